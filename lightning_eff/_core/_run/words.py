"""How errors of others are told within one's own message."""


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of what an error says, at most ``most`` characters; its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]
