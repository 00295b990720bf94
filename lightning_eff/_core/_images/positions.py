"""Positions of patches in smaller images: from modules that interpolate them, or interpolated in a table found here.

A table of learned (or computed) positions has one row per patch of the full image, in a grid, and up to two rows before it for
class tokens. For a smaller image the grid is interpolated bicubically, as in transformers' models.
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

FLAG = "interpolate_pos_encoding"  #: transformers' name of an argument of a model's forward, and of a method
_MOST_SPECIAL = 2  # a class token and a distillation token
_FEWEST_PATCHES = 4


def interpolate_table(table: Tensor, special: int, grid: Side, side: Side) -> Tensor:
    """Return a table of positions (..., special + h w, D) for another grid, (..., special + h' w', D).

    Args:
        table: one row for each of ``special`` tokens, then one for each grid position, row by row.
        special: the number of tokens before the patches.
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
    """A table of positions in a module.

    Attributes:
        path: its dotted path.
        owner: the module that has it.
        name: its attribute name.
        special: the number of first rows for tokens that are not patches.
        grid: (h, w) of the full image's patches.
        patch: the side of a patch in pixels.
        plain: the table itself, if it is a plain attribute.
    """

    path: str
    owner: nn.Module
    name: str
    special: int
    grid: Side
    patch: int
    plain: Tensor | None = None

    def at(self, side: Side) -> Tensor:
        """Return the table for images of ``side`` (in pixels), with a graph to the trained table."""
        held = self.owner._parameters.get(self.name)
        held = self.owner._buffers.get(self.name) if held is None else held
        full = self.plain if held is None else held
        assert full is not None, "a plain attribute is kept in self.plain"
        return interpolate_table(full, self.special, self.grid, (side[0] // self.patch, side[1] // self.patch))


@dataclass
class Seen:
    """Observations in a pass on full images.

    Attributes:
        patch: height and width of the patches into which a convolution cuts the images; (1, 1) if none does.
        tokens: (T, D) of inputs and outputs of modules.
        ids: by the id of an ``nn.Embedding``, the number of its ids per sample, and the largest id.
        called: modules that returned a tensor, in order, with its number of dimensions.
    """

    patch: Side = (1, 1)
    tokens: set[Side] = field(default_factory=set)
    ids: dict[int, tuple[int, int]] = field(default_factory=dict)
    called: list[tuple[nn.Module, int]] = field(default_factory=list)


@contextmanager
def watched(side: Side, size: int) -> Iterator[Seen]:
    """Observe the modules in a pass on ``size`` images of ``side``."""
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
    """Return the table of positions that a module adds to the patches of images of ``side``, or None.

    It is a tensor (1, N, D) or (N, D), or the weight of an ``nn.Embedding``. It has a row per patch of a grid, and up to two
    more before them. D and about N must match observed tokens. Modules that interpolate by themselves are skipped.

    Raises:
        ValueError: if there are several, or one with more rows than such images have patches, of which a part may be used.
    """
    found: list[Table] = []
    doubtful: list[str] = []
    for path, owner, name, t in _candidates(module):
        rows, dim = t.shape[-2:]
        called = seen.ids.get(id(owner)) if isinstance(owner, nn.Embedding) else None
        if called is not None and not any((called[0] + k, dim) in seen.tokens for k in range(_MOST_SPECIAL + 1)):
            continue  # an embedding of classes or of words
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
            f"{who}: {', '.join(several)} may hold the positions of patches, so the positions in images smaller than"
            f" {side[0]} x {side[1]} are unknown; expected one table with one row per patch. Compute positions from the images'"
            f" size in the module, or remove {who}."
        )
    return found[0] if found else None


def _grid(places: int, special: int, side: Side) -> tuple[int, int, Side] | None:
    """Return special tokens, the patch side in pixels, and (h, w), if this many positions are a grid of square patches."""
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
            continue  # weights of linear layers and norms
        for name, t in {**owner._parameters, **owner._buffers, **plain}.items():
            if t is None or not t.is_floating_point() or t.ndim < 2 or t.ndim > 3:
                continue
            if t.ndim == 2 or t.shape[0] == 1:
                yield f"{prefix}.{name}" if prefix else name, owner, name, t


class Positions:
    """Lets a module accept smaller images, from :meth:`enter` to :meth:`leave`.

    Args:
        module: the LightningModule.
        table: its table of positions, if it has one that it does not interpolate itself.
    """

    def __init__(self, module: nn.Module, table: Table | None) -> None:
        self.table = table
        self._asked = [m for m in module.modules() if _takes_flag(m)]
        self._patches = Patches()
        self._side: Side | None = None

    def enter(self, side: Side) -> None:
        """Use the positions for images of ``side`` from now on."""
        self.leave()
        self._side = side
        for m in self._asked:
            self._patches.set(m, "forward", _with_flag(m.forward))
        if self.table is not None:
            self._patches.set(self.table.owner, self.table.name, self.table.at(side))

    def renew(self) -> None:
        """Compute the table again from the present weights, with a new graph."""
        if self._side is not None and self.table is not None:
            vars(self.table.owner)[self.table.name] = self.table.at(self._side)

    def leave(self) -> None:
        """Use the positions of the full size again. A second call does nothing."""
        self._side = None
        self._patches.restore()

    @property
    def source(self) -> str:
        """The source of positions in smaller images, as text; "" if the module is not changed."""
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
