"""Smaller images for a module: shrink the batches, and test all sizes before any weight changes."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_eff._core._images.images import (
    Filter,
    Images,
    Side,
    check_coordinates,
    find_images,
    resize,
    side_of,
    smaller,
)
from lightning_eff._core._images.positions import Positions, Seen, find_table, watched
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core.batches import select
from lightning_eff._core.steps import Step

_SAMPLES = 2  # samples in the trial; with one, BatchNorm would get a single value at 1 x 1 pixel
_FAILS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError, NotImplementedError)


class Resizing:
    """Shrinks the images of a run, and lets its module accept them.

    Args:
        multiple_of: pixels, >= 1. Sides below the full ones are multiples of it, and of the patches into which a convolution
            cuts images.
        keys: names or positions of the image tensors (N, C, H, W); None finds them automatically.
        who: the technique's name, for messages.
        rescaled: resizes floating-point images (N, C, H, W).
        on_full_pass: called with observations of the modules on the unchanged first batch.

    Attributes:
        full: the height and width of the first batch's images; 0 before it was checked.
        source: the source of positions in smaller images, as text.
    """

    def __init__(
        self,
        *,
        multiple_of: int,
        keys: Sequence[str | int] | None,
        who: str,
        rescaled: Filter = resize,
        on_full_pass: Callable[[Step, Seen], None] | None = None,
    ) -> None:
        self.multiple_of = multiple_of
        self.keys = keys
        self.full: Side = (0, 0)
        self.source = ""
        self._who = who
        self._rescaled = rescaled
        self._on_full_pass = on_full_pass
        self._units: Side = (multiple_of, multiple_of)
        self._positions: Positions | None = None

    @property
    def looked(self) -> bool:
        """Whether the first batch was checked."""
        return self._positions is not None

    def side(self, share: float) -> Side:
        """Return height and width at ``share`` of those of the first batch."""
        return side_of(self.full, share, self._units)

    def at(self, batch: Any, share: float) -> tuple[Any, Side]:
        """Return the batch with images at ``share`` of their height and width, and these; the batch itself at full size."""
        found = find_images(batch, self.keys, who=self._who)
        side = side_of(found.side, share, self._units)
        return (batch if side == found.side else smaller(batch, found, side, self._rescaled)), side

    def enter(self, side: Side) -> None:
        """Prepare the module for images of ``side``."""
        assert self._positions is not None, "look() creates it"
        self._positions.enter(side)

    def renew(self) -> None:
        """Compute positions again from the present weights."""
        if self._positions is not None:
            self._positions.renew()

    def leave(self) -> None:
        """Prepare the module for images of full size again. A second call does nothing."""
        if self._positions is not None:
            self._positions.leave()

    def look(self, step: Step, batch: Any, shares: Iterable[float]) -> None:
        """Test all sizes of the run on some samples of its first batch, by forward passes without a trace.

        Args:
            step: a step of the run.
            batch: its batch.
            shares: the fractions that a run uses, or enough of them to include all its sizes.

        Raises:
            ValueError: if the batch has no images, none would be smaller, or ``training_step`` fails at some size.
        """
        who = self._who
        found = find_images(batch, self.keys, who=who)
        check_coordinates(batch, who=who)
        some, size, seen = self._full_pass(step, batch, found)
        if self._on_full_pass is not None:
            self._on_full_pass(step, seen)
        table = find_table(step.module, found.side, seen, who=who)
        patch = (
            seen.patch
            if table is None
            else (math.lcm(seen.patch[0], table.patch), math.lcm(seen.patch[1], table.patch))
        )
        self._units = (math.lcm(self.multiple_of, patch[0]), math.lcm(self.multiple_of, patch[1]))
        positions = Positions(step.module, table)
        sides = sorted({side_of(found.side, share, self._units) for share in shares} - {found.side})
        if not sides:
            raise ValueError(
                f"{who}: images of {found.side[0]} x {found.side[1]} pixels would never be smaller, in multiples of"
                f" {self._units[0]} x {self._units[1]} (multiple_of={self.multiple_of}, patches of {patch[0]} x {patch[1]})."
                f" Lower multiple_of or the fraction of the side, or remove {who}."
            )
        of_some = find_images(some, self.keys, who=who)
        for side in sides:
            small = smaller(some, of_some, side, self._rescaled)
            if table is not None and table.path.endswith(".weight") and side == sides[0]:
                self._check_ids(step, small, size, side, positions)
            positions.enter(side)
            try:
                step.forward_only(small, size, transform=False)
            except _FAILS as error:
                raise ValueError(self._told(error, found.side, side, positions)) from error
            finally:
                positions.leave()
        self._positions, self.full, self.source = positions, found.side, positions.source

    def _full_pass(self, step: Step, batch: Any, found: Images) -> tuple[Any, int, Seen]:
        """Run some samples at full size, or all if that fails; return them, their number, and the observations."""
        if found.size > _SAMPLES:
            some = select(batch, torch.arange(_SAMPLES), found.size)
            try:
                with watched(found.side, _SAMPLES) as seen:
                    step.forward_only(some, _SAMPLES, transform=False)
            except _FAILS:
                pass  # an error with all samples is raised below
            else:
                return some, _SAMPLES, seen
        with watched(found.side, found.size) as seen:
            step.forward_only(batch, found.size, transform=False)
        return batch, found.size, seen

    def _check_ids(self, step: Step, small: Any, size: int, side: Side, positions: Positions) -> None:
        """Raise ``ValueError`` if a module looks up full-size positions in an ``nn.Embedding`` for a smaller image."""
        table = positions.table
        assert table is not None
        try:
            with watched(side, size) as seen:
                step.forward_only(small, size, transform=False)
        except _FAILS as error:
            raise ValueError(self._told(error, _full_of(table.grid, table.patch), side, positions)) from error
        rows = table.special + (side[0] // table.patch) * (side[1] // table.patch)
        if seen.ids.get(id(table.owner), (0, 0))[1] >= rows:
            error = IndexError(f"{table.path} was indexed at position {seen.ids[id(table.owner)][1]} of {rows}")
            raise ValueError(self._told(error, _full_of(table.grid, table.patch), side, positions))

    def _told(self, error: Exception, full: Side, side: Side, positions: Positions) -> str:
        return (
            f"{self._who}: training_step fails with images of {side[0]} x {side[1]} pixels instead of {full[0]} x"
            f" {full[1]}, with {positions.source or 'no table of positions found'}: {first_line(error)}. Expected a module for"
            f" images of any size (a multiple of {self._units[0]} x {self._units[1]} pixels): a CNN with global pooling, or a"
            " ViT whose positions follow the size, by interpolation or rotary embeddings. Increase multiple_of if sizes must"
            f" be multiples of more pixels, or remove {self._who}."
        )


def _full_of(grid: Side, patch: int) -> Side:
    return grid[0] * patch, grid[1] * patch


def has_images(named: Iterable[tuple[str, Tensor]]) -> bool:
    """Return whether a tensor may be images (N, C, H, W), as in :func:`find_images`."""
    return any(t.ndim == 4 and min(t.shape) > 0 and (t.is_floating_point() or t.dtype == torch.uint8) for _, t in named)
