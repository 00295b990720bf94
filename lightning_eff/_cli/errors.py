"""How a command reports an error: one paragraph if the message explains it, otherwise a traceback.

Errors that this package, Lightning or torch raise on purpose explain the problem, and their traceback shows only library
code. Errors in the user's code keep their traceback, which shows where they are.
"""

import argparse
import difflib
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from typing_extensions import override

from lightning_eff._core._lightning.names import OTHER, OWN

_OWN = str(Path(__file__).parent.parent)
_LIBRARIES = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")})
_COMMON = {"A", "An", "Cannot", "Expected", "Got", "No", "Nothing", "The", "There", "This"}
_CANNOT_START = (ValueError, TypeError, ImportError, OSError)


class UsageError(ValueError):
    """Raised for wrong arguments or a wrong config."""


class ConfigError(UsageError):
    """Raised by the config parser; the cause can be an error in the code that the config names."""


def did_you_mean(word: str, choices: Iterable[str], suffix: str = "", *, cutoff: float = 0.6) -> str:
    """Return `` Did you mean 'choice'?`` with the choice closest to ``word`` plus ``suffix``, or an empty string.

    Args:
        word: what was given.
        choices: what could be meant.
        suffix: what to write after the choice.
        cutoff: the similarity from which on a choice counts as close. Give more if there are many choices.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f" Did you mean {by_lower[near[0]] + suffix!r}?" if near else ""


def check_configs(args: Sequence[str]) -> None:
    """Check the files of ``--config`` before anything is imported.

    Raises:
        UsageError: if a file does not exist, is not valid YAML, or does not contain a mapping.
    """
    import yaml

    for option, following in zip(args, [*args[1:], None], strict=False):
        name, equals, path = option.partition("=")
        path = path if equals else following
        if name not in ("--config", "-c") or path is None or path.lstrip().startswith("{"):
            continue
        file = Path(path)
        if not file.is_file():
            around = [p.stem for p in file.parent.glob(f"*{file.suffix or '.yaml'}")] if file.parent.is_dir() else []
            raise UsageError(
                f"--config {path}: no such file. Pass the path of a YAML config."
                f"{did_you_mean(file.stem, around, file.suffix or '.yaml')}"
            )
        try:
            content = yaml.safe_load(file.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            mark = getattr(error, "problem_mark", None)
            at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
            problem = getattr(error, "problem", None) or str(error)
            raise UsageError(f"--config {path}: not valid YAML{at}: {' '.join(problem.split())}.") from None
        if not isinstance(content, dict):
            raise UsageError(
                f"--config {path}: got a {type(content).__name__}; expected a mapping with sections such as trainer, model"
                " and data."
            )


class Arguments(argparse.ArgumentParser):
    """An argument parser that requires full option names, and raises :class:`UsageError` instead of exiting."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **kwargs)

    @override
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            hint = did_you_mean(word, self._option_string_actions) if word.startswith("-") else ""
            self.error(f"got {' '.join(unknown)}; there is no such option.{hint}")
        return found

    @override
    def error(self, message: str) -> NoReturn:
        for action in self._actions:
            _, _, got = message.partition(f"argument {'/'.join(action.option_strings)}: invalid choice: ")
            if got and action.choices:
                message += did_you_mean(got.partition(" (")[0].strip("'"), map(str, action.choices))
        raise UsageError(f"{message}{'' if message.endswith(('.', '?')) else '.'} More: {self.prog} --help")


@contextmanager
def told(command: str, *, debug: bool = False, interrupted: str | None = None) -> Iterator[None]:
    """Report errors in this block in one paragraph and exit; raise those that need a traceback.

    Args:
        command: start of the paragraph, such as "lightning-eff fit".
        debug: raise every error with its traceback.
        interrupted: what to say after an interruption; None raises it.

    Raises:
        SystemExit: with status 2 for wrong arguments or a wrong config, 1 for a run that failed, and 130 if interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        if interrupted is None:
            raise
        print(f"\n{interrupted}", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        root = original(error)
        if debug:
            raise
        if not speaks(root):
            if root is error:
                raise
            raise root from None  # hides the parser's traceback
        words = str(error if isinstance(error, UsageError) and not _is_own(root) else root)
        print(f"{command}: {_in_a_sentence(words.strip()) or type(root).__name__}", file=sys.stderr)
        raise SystemExit(status(root)) from None


def _in_a_sentence(words: str) -> str:
    """Start ``words`` with a lower-case letter, unless they start with a name."""
    first = words.partition(" ")[0]
    return words[0].lower() + words[1:] if first in _COMMON else words


def original(error: BaseException) -> BaseException:
    """Return the error that a parser rephrased, from a constructor or an imported module, or ``error`` itself."""
    cause: BaseException | None = error
    while cause is not None:
        if _is_users(cause) or (_is_own(cause) and not isinstance(cause, ConfigError)):
            return cause
        cause = cause.__cause__
    return error


def speaks(error: BaseException) -> bool:
    """Whether the error's message explains it without a traceback."""
    if isinstance(error, UsageError) or _is_own(error):
        return True
    if _is_users(error) or not _is_told(error):
        return False
    return isinstance(error, ImportError | OSError) or (bool(_frames(error)) and _on_purpose(error))


def status(error: BaseException) -> int:
    """Return exit status 2 for an error in the settings before training begins, otherwise 1."""
    loops = [str(Path(*name.split("."), "loops")) for name in (OWN, OTHER)]
    began = any(path in frame.f_code.co_filename for frame, _ in _frames(error) for path in loops)
    return 2 if _is_of_a_setting(error) and not began else 1


def _is_of_a_setting(error: BaseException) -> bool:
    """Whether the error has a type that is used to refuse settings."""
    return isinstance(error, _CANNOT_START) or type(error).__name__ == "MisconfigurationException"


def _is_told(error: BaseException) -> bool:
    return _is_of_a_setting(error) or isinstance(error, RuntimeError)


def _is_own(error: BaseException) -> bool:
    """Whether this package raised the error on purpose, or defines its class."""
    if type(error).__module__.startswith("lightning_eff."):
        return True
    frames = _frames(error)
    return bool(frames) and _is_told(error) and _in_package(frames[-1][0]) and _on_purpose(error)


def _is_users(error: BaseException) -> bool:
    """Whether the user's code is in the traceback, and this package did not raise the error on purpose."""
    return not _is_own(error) and any(not _in_package(f) and not _in_library(f) for f, _ in _frames(error))


def _in_package(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OWN) or frame.f_globals.get("__name__", "").startswith("lightning_eff.")


def _in_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    if "-packages" in name or not Path(name).is_file():  # compiled code names files that do not exist
        return True
    return str(Path(name).resolve()).startswith(_LIBRARIES)


def _on_purpose(error: BaseException) -> bool:
    """Whether a ``raise`` statement raised the error."""
    frame, line = _frames(error)[-1]
    return linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise")


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames of the traceback with their line numbers, innermost last."""
    return list(traceback.walk_tb(error.__traceback__))
