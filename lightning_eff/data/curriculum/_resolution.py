"""The engine of techniques that train on smaller images: what a batch becomes, and the trial of all sizes at the start."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._run.words import first_line
from lightning_eff._core.batches import select
from lightning_eff._core.search_space import RunProfile
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Technique
from lightning_eff.data.curriculum._images import (
    Images,
    Side,
    check_coordinates,
    find_images,
    resize,
    side_of,
    smaller,
)
from lightning_eff.data.curriculum._positions import Positions, Seen, find_table, watched

_SAMPLES = 2  # of a batch that the trial takes: one would leave BatchNorm a single value at 1 x 1 pixel
_FAILS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError, NotImplementedError)


def check_multiple(multiple_of: int, *, who: str) -> None:
    """Raise ``ValueError`` unless it is a number of pixels."""
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int) or multiple_of < 1:
        raise ValueError(f"{who}({multiple_of=}): expected an integer >= 1, a number of pixels.")


def check_share(value: float, *, who: str, name: str, of: str) -> None:
    """Raise ``ValueError`` unless it is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{who}({name}={value!r}): expected a number in [0, 1], {of}.")


def check_keys(keys: Sequence[str | int] | None, *, who: str) -> None:
    """Raise ``ValueError`` unless they are names or positions."""
    if keys is not None and (
        isinstance(keys, str)
        or not isinstance(keys, Sequence)
        or not keys
        or any(isinstance(key, bool) or not isinstance(key, str | int) for key in keys)
    ):
        raise ValueError(
            f"{who}({keys=}): expected a list of names or positions, such as ['pixel_values'] or [0], or None to look for"
            " the images."
        )


def no_images(profile: RunProfile) -> str | None:
    """Why smaller images are pointless in such a run."""
    if profile.image_side is None:
        return "samples are no images"
    if profile.image_side < 16:
        return f"images of {profile.image_side} pixels are too small to begin with fewer"
    return None


class SmallerImages(Technique):
    """Trains on images of a share of their full height and width, which a subclass says at each point of the budget.

    Args:
        multiple_of: pixels, >= 1; sides below the full ones are multiples of it, and of the patches into which a convolution
            cuts images.
        keys: names or positions of the tensors (N, C, H, W) that are images; None looks for them.
    """

    def __init__(self, *, multiple_of: int, keys: Sequence[str | int] | None) -> None:
        check_multiple(multiple_of, who=type(self).__name__)
        check_keys(keys, who=type(self).__name__)
        self.multiple_of = multiple_of
        self.keys = None if keys is None else list(keys)
        self._reset()

    def _reset(self) -> None:
        self._positions: Positions | None = None
        self._units: Side = (self.multiple_of, self.multiple_of)
        self._full: Side = (0, 0)  # of the first batch; 0 before it
        self._side: Side = (0, 0)
        self._last_step = -1
        self._used: dict[str, list[int]] = {}  # by side, as text: the first step with it, and how many
        self._how = ""  # where positions come from

    @abstractmethod
    def share_of(self, u: float) -> float:
        """The share of the full height and width at the share ``u`` of the budget, in (0, 1], never falling."""

    @abstractmethod
    def shares(self) -> Iterable[float]:
        """The shares that a run takes, or so many of them that none of its sizes is missed."""

    def rescaled(self, images: Tensor, side: Side) -> Tensor:
        """Images (N, C, H, W) of floating point at ``side``."""
        return resize(images, side)

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.TRANSFORM, self._link)
        session.chain.add(Stage.SAVE, self._renew)

    @override
    def detach(self, session: Session) -> None:
        if self._positions is not None:
            self._positions.leave()
            self._positions = None

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        share = self.share_of(self.session.progress.u)
        if share >= 1.0 and self._full != (0, 0):
            self._count(step, self._full)
            return proceed(batch)
        if self._positions is None:
            on_all_ranks(self.session, lambda: self._look(step, batch))
        positions = self._positions
        assert positions is not None, "it was made as the first batch was looked at"
        found = find_images(batch, self.keys, who=type(self).__name__)
        side = side_of(found.side, share, self._units)
        self._count(step, side)
        if side == found.side:
            return proceed(batch)
        small = smaller(batch, found, side, self.rescaled)
        positions.enter(side)
        if torch.is_grad_enabled():  # blocks may be run again in the backward pass
            self.session.when_step_ends(positions.leave)
            return proceed(small)
        try:
            return proceed(small)
        finally:
            positions.leave()

    def _renew(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Each pass has a table of positions made of the weights that it runs at."""
        if self._positions is not None:
            self._positions.renew()
        return proceed(batch)

    # -- the trial

    def _look(self, step: Step, batch: Any) -> None:
        """Try all sizes of the run with some samples of its first batch, by forward passes that leave no trace.

        Raises:
            ValueError: if the batch holds no images, none would be smaller, or ``training_step`` cannot do with some size.
        """
        who = type(self).__name__
        found = find_images(batch, self.keys, who=who)
        check_coordinates(batch, who=who)
        some, size, seen = self._full_pass(step, batch, found)
        self._on_full_pass(step, seen)
        table = find_table(step.module, found.side, seen, who=who)
        patch = (
            seen.patch
            if table is None
            else (math.lcm(seen.patch[0], table.patch), math.lcm(seen.patch[1], table.patch))
        )
        self._units = (math.lcm(self.multiple_of, patch[0]), math.lcm(self.multiple_of, patch[1]))
        positions = Positions(step.module, table)
        sides = sorted({side_of(found.side, share, self._units) for share in self.shares()} - {found.side})
        if not sides:
            raise ValueError(
                f"{who}: images of {found.side[0]} x {found.side[1]} pixels would never be smaller, in multiples of"
                f" {self._units[0]} x {self._units[1]} (multiple_of={self.multiple_of}, patches of {patch[0]} x {patch[1]});"
                " expected room for a smaller size. Lower multiple_of or the share, or take the technique out."
            )
        of_some = find_images(some, self.keys, who=who)
        for side in sides:
            small = smaller(some, of_some, side, self.rescaled)
            if table is not None and table.path.endswith(".weight") and side == sides[0]:
                self._check_ids(step, small, size, side, positions)
            positions.enter(side)
            try:
                step.forward_only(small, size, transform=False)
            except _FAILS as error:
                raise ValueError(self._told(error, found.side, side, positions)) from error
            finally:
                positions.leave()
        self._positions, self._full, self._how = positions, found.side, positions.source

    def _on_full_pass(self, step: Step, seen: Seen) -> None:
        """The first batch was run as it is: a subclass may look at what the modules did."""

    def _full_pass(self, step: Step, batch: Any, found: Images) -> tuple[Any, int, Seen]:
        """Run some samples as they are: which and how many they are, and what was seen. All where it cannot be some."""
        if found.size > _SAMPLES:
            some = select(batch, torch.arange(_SAMPLES), found.size)
            try:
                with watched(found.side, _SAMPLES) as seen:
                    step.forward_only(some, _SAMPLES, transform=False)
            except _FAILS:
                pass  # what is wrong with all of them is raised below
            else:
                return some, _SAMPLES, seen
        with watched(found.side, found.size) as seen:
            step.forward_only(batch, found.size, transform=False)
        return batch, found.size, seen

    def _check_ids(self, step: Step, small: Any, size: int, side: Side, positions: Positions) -> None:
        """Raise ``ValueError`` if an ``nn.Embedding`` of positions is asked for those of the full image in a smaller one."""
        table = positions.table
        assert table is not None
        try:
            with watched(side, size) as seen:
                step.forward_only(small, size, transform=False)
        except _FAILS as error:
            raise ValueError(self._told(error, self._full_of(table.grid, table.patch), side, positions)) from error
        rows = table.special + (side[0] // table.patch) * (side[1] // table.patch)
        if seen.ids.get(id(table.owner), (0, 0))[1] >= rows:
            error = IndexError(f"{table.path} is asked for place {seen.ids[id(table.owner)][1]} of {rows}")
            raise ValueError(self._told(error, self._full_of(table.grid, table.patch), side, positions))

    @staticmethod
    def _full_of(grid: Side, patch: int) -> Side:
        return grid[0] * patch, grid[1] * patch

    def _told(self, error: Exception, full: Side, side: Side, positions: Positions) -> str:
        return (
            f"{type(self).__name__}: training_step cannot do with images of {side[0]} x {side[1]} pixels, of {full[0]} x"
            f" {full[1]}, with {positions.source or 'no table of positions found'}: {first_line(error)}. Expected a module for"
            f" images of any size (a multiple of {self._units[0]} x {self._units[1]} pixels): a CNN with global pooling, or a"
            " ViT whose positions follow the size, by interpolation or rotary ones. Raise multiple_of where sizes must be"
            " multiples of more pixels, or take the technique out."
        )

    # -- what it tells

    def _count(self, step: Step, side: Side) -> None:
        self._side = side
        if step.global_step != self._last_step:  # micro-batches and scoring passes of one step count once
            self._last_step = step.global_step
            self._used.setdefault(_text(side), [step.global_step, 0])[1] += 1

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"side": self._side[0], "share": self._side[0] / self._full[0] if self._full[0] else 1.0}

    @override
    def summary(self) -> str:
        if not self._used:
            return "no step taken"
        told = [f"{side} for {steps:,}" for side, (_, steps) in self._used.items()]
        told[0] += " step" if next(iter(self._used.values()))[1] == 1 else " steps"
        last = [*self._used][-1]
        if last == _text(self._full) == _text(self._side):
            told[-1] = f"{last} from step {self._used[last][0]:,} on"
        short = told if len(told) <= 6 else [*told[:2], f"({len(told) - 4} more)", *told[-2:]]
        return ", ".join(short) + (f" ({self._how})" if self._how else "")

    @override
    def state_dict(self) -> dict[str, Any]:
        used = {side: list(counts) for side, counts in self._used.items()}
        return {"full": list(self._full), "side": list(self._side), "last_step": self._last_step, "used": used}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._full, self._side = tuple(state_dict["full"]), tuple(state_dict["side"])
        self._last_step = state_dict["last_step"]
        self._used = {side: list(counts) for side, counts in state_dict["used"].items()}


def _text(side: Side) -> str:
    return f"{side[0]} px" if side[0] == side[1] else f"{side[0]} x {side[1]} px"
