"""The lines of the user's own code from which torch was called."""

import functools
import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import lightning
import torch
from torch import nn

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
_PACKAGES = ("site-packages", "dist-packages")
_OURS = str(Path(__file__).parents[2]) + os.sep
_TORCH = str(Path(str(torch.__file__)).parent) + os.sep
_CHECKOUT = str(Path(str(lightning.__file__)).parent) + os.sep  # Lightning need not be installed as a wheel
_STANDARD = tuple({sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep})
CHECKING = " that checks its arguments"
_CALLS = ("_call_impl", "_wrapped_call_impl")


@dataclass(frozen=True)
class Place:
    """A line of the user's code.

    Attributes:
        file: its path.
        line: its number.
        through: the library or part of torch that the line called, such as "torchmetrics" or "torch.distributions", with
            :data:`CHECKING` where it does so.
        function: the name of the function that has the line, where it is of interest.
    """

    file: str
    line: int
    through: str = ""
    function: str = ""

    def __str__(self) -> str:
        return f"{shown(self.file)}:{self.line}"

    @property
    def code(self) -> str:
        """The line itself."""
        return linecache.getline(self.file, self.line).strip()


def shown(file: str) -> str:
    """A path as people read it: relative to the working directory if it lies below it."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


@functools.lru_cache(maxsize=4096)
def owner(file: str) -> str:
    """Who wrote a file: "torch", "lightning", "ours", "python", the name of an installed package, or "user"."""
    if file.startswith((_TORCH, "<eval_with_key>")) or "torchinductor_" in file:
        return "torch"  # what torch.compile writes, too
    if file.startswith(_OURS):
        return "ours"
    if file.startswith(_CHECKOUT):
        return "lightning"
    parts = Path(file).parts
    for folder in _PACKAGES:
        if folder in parts:
            at = len(parts) - parts[::-1].index(folder)
            package = parts[at].removesuffix(".py") if at < len(parts) else folder
            return "lightning" if package in _LIGHTNING else package
    if file.startswith(_STANDARD) or file.startswith("<frozen"):
        return "python"
    return "user"


def package_of(module: nn.Module) -> frozenset[str]:
    """The installed packages whose code counts as the user's own, because the user's module is of their classes."""
    files = (getattr(sys.modules.get(cls.__module__), "__file__", None) or "" for cls in type(module).__mro__)
    return frozenset(owner(file) for file in files if file) - {"torch", "lightning", "ours", "python"}


def place(own: frozenset[str] = frozenset()) -> Place | None:
    """The line of the user's code that is being run; None if Lightning or this package made the call by itself.

    Args:
        own: installed packages that count as the user's.
    """
    frame: FrameType | None = sys._getframe(1)
    through, checks = "", False
    while frame is not None:
        who = owner(frame.f_code.co_filename)
        if who == "user" or who in own:
            return Place(
                frame.f_code.co_filename, frame.f_lineno, through + CHECKING if checks and through else through
            )
        if who == "lightning" and not through:
            return None
        if not through and who not in ("python", "ours", "lightning"):
            through = _part(frame.f_code.co_filename) if who == "torch" else who
        checks = checks or "validat" in frame.f_code.co_name
        frame = frame.f_back
    return None


def chain(own: frozenset[str] = frozenset()) -> tuple[Place, ...]:
    """The lines of the user's code that call each other in the step that is being run, the outermost first.

    Args:
        own: installed packages that count as the user's.
    """
    found: list[Place] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        who = owner(frame.f_code.co_filename)
        if who == "lightning" and found:
            break
        if who == "user" or who in own:
            found.append(Place(frame.f_code.co_filename, frame.f_lineno, function=frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(found))


def parting(first: tuple[Place, ...], second: tuple[Place, ...]) -> tuple[Place | None, Place | None]:
    """Where two chains of calls part; the line that calls a ``forward`` twice, where they are the same."""
    for one, other in zip(first, second, strict=False):
        if one != other:
            return one, other
    calls = [place for place in first if place.function != "forward"] or list(first)
    return (calls[-1], calls[-1]) if calls else (None, None)


def _part(file: str) -> str:
    """ "torch.optim" or "torch.distributions" for files of theirs, which read values by themselves; "" for others."""
    head = file.removeprefix(_TORCH).split(os.sep)[0]
    return f"torch.{head}" if head in ("optim", "distributions") else ""


def running(names: dict[int, str]) -> tuple[str, ...]:
    """The names of the modules whose ``forward`` is being run, the outermost first.

    Args:
        names: of modules, by their ids.
    """
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _CALLS and frame.f_code.co_filename.startswith(_TORCH):
            name = names.get(id(frame.f_locals.get("self")))
            if name is not None and name not in found:
                found.append(name)
        frame = frame.f_back
    return tuple(reversed(found))
