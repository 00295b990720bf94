"""Quote errors of other code in messages."""

from collections.abc import Iterator


def first_line(error: BaseException, most: int = 200) -> str:
    """Return the first line of an error's message, at most ``most`` characters; its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, each once. An error raised again can be a cause of its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
