"""The engine of techniques that train on smaller images, a share of their sides at each point of the budget."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._images.images import Side, resize
from lightning_eff._core._images.positions import Seen
from lightning_eff._core._images.resizing import Resizing, check_keys, check_multiple
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.search_space import RunProfile
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Technique


def check_share(value: float, *, who: str, name: str, of: str) -> None:
    """Raise ``ValueError`` unless it is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{who}({name}={value!r}): expected a number in [0, 1], {of}.")


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

    needs: ClassVar[Need] = Need.CALLS

    def __init__(self, *, multiple_of: int, keys: Sequence[str | int] | None) -> None:
        check_multiple(multiple_of, who=type(self).__name__)
        check_keys(keys, who=type(self).__name__)
        self.multiple_of = multiple_of
        self.keys = None if keys is None else list(keys)
        self._reset()

    def _reset(self) -> None:
        self._resizing: Resizing | None = None
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
        if self._resizing is not None:
            self._resizing.leave()
            self._resizing = None

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        share = self.share_of(self.session.progress.u)
        if share >= 1.0 and self._full != (0, 0):
            self._count(step, self._full)
            return proceed(batch)
        if self._resizing is None:
            on_all_ranks(self.session, lambda: self._look(step, batch))
        resizing = self._resizing
        assert resizing is not None, "it was made as the first batch was looked at"
        small, side = resizing.at(batch, share)
        self._count(step, side)
        if small is batch:
            return proceed(batch)
        resizing.enter(side)
        if torch.is_grad_enabled():  # blocks may be run again in the backward pass
            self.session.when_step_ends(resizing.leave)
            return proceed(small)
        try:
            return proceed(small)
        finally:
            resizing.leave()

    def _renew(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Each pass has a table of positions made of the weights that it runs at."""
        if self._resizing is not None:
            self._resizing.renew()
        return proceed(batch)

    # -- the trial

    def _look(self, step: Step, batch: Any) -> None:
        """Try all sizes of the run with some samples of its first batch."""
        resizing = Resizing(
            multiple_of=self.multiple_of,
            keys=self.keys,
            who=type(self).__name__,
            rescaled=self.rescaled,
            on_full_pass=self._on_full_pass,
        )
        resizing.look(step, batch, self.shares())
        self._resizing, self._full, self._how = resizing, resizing.full, resizing.source

    def _on_full_pass(self, step: Step, seen: Seen) -> None:
        """The first batch was run as it is: a subclass may look at what the modules did."""

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
