"""How errors of others are told within one's own message."""

from collections.abc import Iterator


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of what an error says, at most ``most`` characters; its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what caused it, each once: an error that is raised anew is at times a cause of its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
