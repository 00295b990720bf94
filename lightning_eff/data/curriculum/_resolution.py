"""The base class of techniques that train on smaller images, with a size that depends on the used budget."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.batch import BatchKeys
from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core._images.images import Side, resize
from lightning_eff._core._images.positions import Seen
from lightning_eff._core._images.resizing import Resizing
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.search_space import RunProfile
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Technique
from lightning_eff.data.curriculum._sizes import SizesUsed

ImageKeys = Annotated[Sequence[str | int] | None, BatchKeys()]
Scale = Annotated[float, Fraction(above=0)]


def no_images(profile: RunProfile) -> str | None:
    """Explain why smaller images are pointless in such a run, or return None."""
    if profile.image_side is None:
        return "samples are not images"
    if profile.image_side < 16:
        return f"images of {profile.image_side} pixels are too small to shrink"
    return None


class SmallerImages(Technique):
    """Trains on images at a fraction of their full height and width, which a subclass defines over the budget.

    Args:
        multiple_of: the number of pixels that smaller sides are multiples of. They are also multiples of the patch size.
        keys: the tensors (N, C, H, W) that are images, by name or position. None finds them.
    """

    constraints = (
        "needs automatic optimization, batches with images (N, C, H, W), and a module for images of any size, such as a CNN"
        " with global pooling or a ViT whose positions can be interpolated; every new size recompiles a compiled module"
    )
    needs: ClassVar[Need] = Need.CALLS
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(self, *, multiple_of: int, keys: Sequence[str | int] | None) -> None:
        self.multiple_of = multiple_of
        self.keys = keys

    def _reset(self) -> None:
        self._resizing: Resizing | None = None
        self._full: Side = (0, 0)  # of the first batch, 0 before it
        self._side: Side = (0, 0)
        self._used = SizesUsed()  # by side, as text
        self._how = ""  # where positions come from

    @abstractmethod
    def share_of(self, u: float) -> float:
        """The fraction of the full height and width at the used fraction ``u`` of the budget, in (0, 1], never decreasing."""

    @abstractmethod
    def shares(self) -> Iterable[float]:
        """The fractions of a run, or enough of them to cover each of its sizes."""

    def rescaled(self, images: Tensor, side: Side) -> Tensor:
        """Resize floating-point images (N, C, H, W) to ``side``."""
        return resize(images, side)

    @override
    def attach(self, session: Session) -> None:
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
        assert resizing is not None, "the first batch sets it"
        small, side = resizing.at(batch, share)
        self._count(step, side)
        if small is batch:
            return proceed(batch)
        resizing.enter(side)
        if torch.is_grad_enabled():  # blocks may run again in the backward pass
            self.session.when_step_ends(resizing.leave)
            return proceed(small)
        try:
            return proceed(small)
        finally:
            resizing.leave()

    def _renew(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Compute the table of positions from the weights of each pass."""
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
        """Hook for subclasses after the first batch has run at full size, with the module calls in ``seen``."""

    # -- report and state

    def _count(self, step: Step, side: Side) -> None:
        self._side = side
        self._used.count(step, _text(side))

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"side": self._side[0], "share": self._side[0] / self._full[0] if self._full[0] else 1.0}

    @override
    def summary(self) -> str:
        at_full = self._full == self._side
        listed = self._used.summary(str, final=_text(self._full) if at_full else None)
        return listed + (f" ({self._how})" if self._how and self._used.counts else "")

    @override
    def state_dict(self) -> dict[str, Any]:
        own = {"full": list(self._full), "side": list(self._side)}
        return {**super().state_dict(), **own, **self._used.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._full, self._side = tuple(state_dict["full"]), tuple(state_dict["side"])
        self._used.load_state_dict(state_dict)


def _text(side: Side) -> str:
    return f"{side[0]} px" if side[0] == side[1] else f"{side[0]} x {side[1]} px"
