"""``--technique NAME``: the tests of one technique alone, which are its own file, its contract and its pairs."""

import difflib
import re
import zlib
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


def named(asked: str, names: Collection[str]) -> str:
    """Which of ``names`` is meant by ``asked``, however it is written.

    Raises:
        pytest.UsageError: with the nearest names, if none is.
    """
    plain = {re.sub("[^a-z0-9]", "", name.lower()): name for name in names}
    key = re.sub("[^a-z0-9]", "", asked.lower())
    if key in plain:
        return plain[key]
    near = [plain[match] for match in difflib.get_close_matches(key, plain, n=3, cutoff=0.4)]
    near += [name for match, name in plain.items() if key and key in match and name not in near]
    hint = f"nearest are {', '.join(near)}" if near else f"expected one of {', '.join(sorted(names))}"
    raise pytest.UsageError(
        f"got the technique {asked!r}, which nothing has that is exported or stands in for it; {hint}."
    )


def one_of(n: int, *key: str) -> Any:
    """The marks of what is tried each time for one of ``n`` keys, always the same ones, and for the others if slow ones run."""
    return () if share_of(n, *key) == 0 else pytest.mark.slow


def often(n: int, *key: str) -> Any:
    """The marks of what `make test` tries for one of ``n`` keys, always the same ones, and `make test-full` for all."""
    return () if share_of(n, *key) == 0 else pytest.mark.full


def slow_ones_run(config: pytest.Config) -> bool:
    """Whether slow tests are asked for: to make thousands of them takes seconds in each worker."""
    return "not slow" not in config.option.markexpr


def share_of(n: int, *key: str) -> int:
    """In which of ``n`` parts this key is, from 0 on."""
    return zlib.crc32("+".join(key).encode()) % n


CHOSEN = pytest.StashKey[str | None]()


def choose(config: pytest.Config) -> None:
    """Look up what ``--technique`` gives, before anything is collected."""
    asked = config.getoption("technique")
    config.stash[CHOSEN] = None if asked is None else named(asked, modules())


def chosen(config: pytest.Config) -> str | None:
    """The name that ``--technique`` gives, or None for all tests."""
    return config.stash[CHOSEN]


def home(name: str) -> str:
    """The module of something exported, or of a stand-in."""
    import lightning_eff
    from tests.cases import STAND_INS

    return (getattr(lightning_eff, name, None) or type(STAND_INS[name].active())).__module__


@cache
def modules() -> dict[str, str]:
    """The last part of the module of everything that is exported or stands in for it, by name: its tests are called so."""
    import lightning_eff
    from tests.cases import STAND_INS

    return {name: home(name).rpartition(".")[2].removeprefix("_") for name in (*lightning_eff.__all__, *STAND_INS)}


def own_files(name: str) -> list[Path]:
    """The files of tests of ``name``: that which is called after its module, or else those of its room that speak of it."""
    _, *room, last = home(name).split(".")
    files = sorted(TESTS.joinpath(*room).glob("test_*.py"))
    called = [path for path in files if path.stem == f"test_{last.removeprefix('_')}"]
    return called or [path for path in files if re.search(rf"\b{name}\b", path.read_text())]


def may_hold(path: Path, name: str) -> bool:
    """Whether a test file may hold tests of ``name``: others need not be imported."""
    if path.stem == f"test_{modules()[name]}":
        return True
    text = path.read_text()
    return name in text or any(f"tests.{table} import" in text for table in ("cases", "plugins"))


def own(items: Sequence[pytest.Item], name: str) -> list[pytest.Item]:
    """Those of ``items`` that stand in the files of ``name``, that are a case for it, or that hold its pairs."""
    files = set(own_files(name))

    def belongs(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        values = [] if callspec is None else callspec.params.values()
        case = any(isinstance(value, str) and value == name for value in values)
        return case or item.path in files or bool(callspec and callspec.params.keys() & {"stack", "group"})

    return [item for item in items if belongs(item)]
