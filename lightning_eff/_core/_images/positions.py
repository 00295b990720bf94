"""Positions of the patches of smaller images: asked of modules that interpolate them, or interpolated in a table found here.

A table of learned (or computed) positions has one row for each patch of the full image, in a grid, and maybe one or two in
front for class tokens. In a smaller image it is the grid that is interpolated, bicubically, as transformers' models do.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from lightning_eff._core._images.images import Side
from lightning_eff._core.patches import Patches

FLAG = "interpolate_pos_encoding"  #: what transformers call the argument of a model's forward, and a method of its own
_MOST_SPECIAL = 2  # a class token, and one for distillation
_FEWEST_PATCHES = 4


def interpolate_table(table: Tensor, special: int, grid: Side, side: Side) -> Tensor:
    """A table of positions (..., special + h w, D) for another grid, (..., special + h' w', D).

    Args:
        table: a row for each of ``special`` tokens, then one for each place of the grid, row by row.
        special: tokens in front of the patches.
        grid: (h, w) of the table.
        side: (h', w').
    """
    rows, dim = table.shape[-2:]
    first, places = table.split([special, rows - special], dim=-2)
    maps = places.reshape(1, *grid, dim).permute(0, 3, 1, 2)
    maps = F.interpolate(maps.float(), size=side, mode="bicubic", align_corners=False).to(table.dtype)
    return torch.cat([first, maps.permute(0, 2, 3, 1).reshape(*table.shape[:-2], -1, dim)], dim=-2)


@dataclass(frozen=True)
class Table:
    """A table of positions, where a module keeps it.

    Attributes:
        path: its dotted path.
        owner: the module.
        name: its attribute there.
        special: rows in front, of tokens that are no patches.
        grid: (h, w) of the full image's patches.
        patch: pixels of a patch's side.
        plain: the table itself, where it is a plain attribute.
    """

    path: str
    owner: nn.Module
    name: str
    special: int
    grid: Side
    patch: int
    plain: Tensor | None = None

    def at(self, side: Side) -> Tensor:
        """The table for images of ``side`` (in pixels), with a graph to the one that is trained."""
        held = self.owner._parameters.get(self.name)
        held = self.owner._buffers.get(self.name) if held is None else held
        full = self.plain if held is None else held
        assert full is not None, "what is neither parameter nor buffer was kept as it was found"
        return interpolate_table(full, self.special, self.grid, (side[0] // self.patch, side[1] // self.patch))


@dataclass
class Seen:
    """What a pass on full images showed.

    Attributes:
        patch: height and width of the patches into which a convolution cuts the images; (1, 1) where none does.
        tokens: (T, D) of what modules got and returned.
        ids: by the id of an ``nn.Embedding``, the number of ids that it was given for a sample, and the largest.
        called: modules that returned a tensor, in their order, with its number of dimensions.
    """

    patch: Side = (1, 1)
    tokens: set[Side] = field(default_factory=set)
    ids: dict[int, tuple[int, int]] = field(default_factory=dict)
    called: list[tuple[nn.Module, int]] = field(default_factory=list)


@contextmanager
def watched(side: Side, size: int) -> Iterator[Seen]:
    """Note what the modules do in the pass within, on ``size`` images of ``side``."""
    seen = Seen()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if isinstance(module, nn.Conv2d) and first is not None and first.shape[-2:] == side and seen.patch == (1, 1):
            kernel, stride = tuple(module.kernel_size), tuple(module.stride)
            if kernel == stride and isinstance(module.padding, tuple) and not any(module.padding):
                seen.patch = (int(kernel[0]), int(kernel[1]))
        if isinstance(module, nn.Embedding) and first is not None and first.numel():
            seen.ids[id(module)] = (first.shape[-1] if first.ndim else 1, int(first.max()))
        if isinstance(output, Tensor):
            seen.called.append((module, output.ndim))
        for t in (*args, output):
            if isinstance(t, Tensor) and t.ndim == 3 and size in t.shape[:2]:
                seen.tokens.add((t.shape[1 if t.shape[0] == size else 0], t.shape[2]))
            elif isinstance(t, Tensor) and t.ndim == 4 and t.shape[0] == size:
                seen.tokens |= {(t.shape[2] * t.shape[3], t.shape[1]), (t.shape[1] * t.shape[2], t.shape[3])}

    handle = register_module_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def find_table(module: nn.Module, side: Side, seen: Seen, *, who: str) -> Table | None:
    """The table of positions that a module adds to the patches of images of ``side``, or None where it holds none.

    It is a tensor (1, N, D) or (N, D), or the weight of an ``nn.Embedding``, with a row for each patch of a grid, and maybe
    one or two in front, of the width of tokens that were seen, of about as many as those. Modules that interpolate by
    themselves are passed over.

    Raises:
        ValueError: if there are several, or one with more rows than the patches of such images, which might be cut.
    """
    found: list[Table] = []
    doubtful: list[str] = []
    for path, owner, name, t in _candidates(module):
        rows, dim = t.shape[-2:]
        called = seen.ids.get(id(owner)) if isinstance(owner, nn.Embedding) else None
        if called is not None and not any((called[0] + k, dim) in seen.tokens for k in range(_MOST_SPECIAL + 1)):
            continue  # of classes, or of words
        grid = next((g for p in range(_MOST_SPECIAL + 1) if (g := _grid(rows - p, p, side)) is not None), None)
        if grid is not None and any((rows + k, dim) in seen.tokens for k in range(_MOST_SPECIAL + 1)):
            special, patch, (height, width) = grid
            registered = name in owner._parameters or name in owner._buffers
            plain = None if registered else t
            found.append(Table(path, owner, name, special, (height, width), patch, plain))
        elif (called is not None or t.ndim == 3) and any(
            width == dim and _FEWEST_PATCHES <= tokens < rows for tokens, width in seen.tokens
        ):
            doubtful.append(f"{path} {tuple(t.shape)}")
    if len(found) > 1 or doubtful:
        several = [f"{table.path} (for {table.grid[0]} x {table.grid[1]} patches)" for table in found] + doubtful
        raise ValueError(
            f"{who}: {', '.join(several)} may hold the positions of patches, and it cannot be told what they should be in"
            f" smaller images than {side[0]} x {side[1]}; expected one table with a row for each patch. Compute positions from"
            f" the images' size in the module, or take {who} out."
        )
    return found[0] if found else None


def _grid(places: int, special: int, side: Side) -> tuple[int, int, Side] | None:
    """Special tokens, pixels of a patch's side, and (h, w), where so many places are a grid of square patches."""
    if places < _FEWEST_PATCHES:
        return None
    for patch in range(1, min(side) + 1):
        if side[0] % patch == 0 and side[1] % patch == 0 and (side[0] // patch) * (side[1] // patch) == places:
            return special, patch, (side[0] // patch, side[1] // patch)
    return None


def _candidates(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    themselves = {id(part) for m in module.modules() if hasattr(m, FLAG) for part in m.modules()}
    for prefix, owner in module.named_modules():
        if id(owner) in themselves:
            continue
        plain = {name: t for name, t in vars(owner).items() if isinstance(t, Tensor) and not name.startswith("_")}
        if type(owner).__module__.startswith("torch.nn.") and not isinstance(owner, nn.Embedding):
            continue  # weights of maps and norms
        for name, t in {**owner._parameters, **owner._buffers, **plain}.items():
            if t is None or not t.is_floating_point() or t.ndim < 2 or t.ndim > 3:
                continue
            if t.ndim == 2 or t.shape[0] == 1:
                yield f"{prefix}.{name}" if prefix else name, owner, name, t


class Positions:
    """Lets a module take smaller images, from :meth:`enter` to :meth:`leave`.

    Args:
        module: the LightningModule.
        table: its table of positions, if it holds one that it does not interpolate by itself.
    """

    def __init__(self, module: nn.Module, table: Table | None) -> None:
        self.table = table
        self._asked = [m for m in module.modules() if _takes_flag(m)]
        self._patches = Patches()
        self._side: Side | None = None

    def enter(self, side: Side) -> None:
        """Images are of ``side`` from now on."""
        self.leave()
        self._side = side
        for m in self._asked:
            self._patches.set(m, "forward", _with_flag(m.forward))
        if self.table is not None:
            self._patches.set(self.table.owner, self.table.name, self.table.at(side))

    def renew(self) -> None:
        """Make the table anew of weights that may be others by now, with a graph of its own."""
        if self._side is not None and self.table is not None:
            vars(self.table.owner)[self.table.name] = self.table.at(self._side)

    def leave(self) -> None:
        """Images are of their full size again. Calling it again does nothing."""
        self._side = None
        self._patches.restore()

    @property
    def source(self) -> str:
        """Where positions of smaller images come from, in words; "" where the module is left alone."""
        if self.table is not None:
            return f"positions interpolated in {self.table.path}"
        return f"positions interpolated by {type(self._asked[0]).__name__}" if self._asked else ""


def _takes_flag(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return False
    return FLAG in parameters and "pixel_values" in parameters


def _with_flag(forward: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def interpolating(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        bound.arguments[FLAG] = True
        return forward(*bound.args, **bound.kwargs)

    return interpolating
