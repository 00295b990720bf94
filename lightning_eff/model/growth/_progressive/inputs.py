"""The resolution of a step's inputs: the size of its images, or the length of its sequences."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_info

from lightning_eff._core._images.resizing import Resizing, has_images
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.batches import tensors
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step, takes_index
from lightning_eff.model.growth._sizes.length import Length

Kind = Literal["auto", "images", "sequences"]


class Inputs:
    """Makes batches smaller, once :meth:`look` has seen the first one.

    Args:
        kind: "images", "sequences", which are truncated, or "auto", images where there are any.
        multiple_of: for images, as for :class:`Resizing`.
        keys: names or positions of the image or sequence tensors; None looks at shapes.
        who: the technique's name, for messages.
    """

    def __init__(self, *, kind: Kind, multiple_of: int, keys: Sequence[str | int] | None, who: str) -> None:

        self.looked = False
        self._kind: Kind = kind
        self._multiple_of, self._keys, self._who = multiple_of, keys, who
        self._resizing: Resizing | None = None
        self._length: Length | None = None
        self._shares: Sequence[float] = ()

    def look(self, session: Session, batch: Any, batch_idx: int, shares: Sequence[float]) -> None:
        """Find what can be made smaller, and try every size of the run.

        Raises:
            ValueError: if there are no inputs of this kind (never under "auto"), or the module cannot run on some size.
        """
        self.looked, self._shares = True, shares
        if min(shares) == 1.0:
            return
        images = any(session.gather(has_images(tensors(batch))))
        if self._kind == "sequences":
            self._length = Length(mode="truncate", keys=self._keys, who=self._who)
            self._length.short(session, batch, 1.0, shares)
        elif self._kind == "images" or images:
            chain = session.chain
            rest = (batch_idx,) if takes_index(chain.original) else ()
            step = Step(chain, session.module, rest, batch_idx, session.trainer.global_step)
            resizing = Resizing(multiple_of=self._multiple_of, keys=self._keys, who=self._who)
            with session.trainer.precision_plugin.train_step_context():
                on_all_ranks(session, lambda: resizing.look(step, batch, shares))
            self._resizing = resizing
        else:
            rank_zero_info(
                f"{self._who}: searches only the depth, because batches hold no images. inputs='sequences' also searches"
                " lengths."
            )

    @property
    def smaller(self) -> bool:
        """Whether anything can be made smaller."""
        return self._resizing is not None or self._length is not None

    def cost(self, share: float) -> float:
        """Return the number of pixels or tokens at ``share``, relative to the full number."""
        if self._resizing is not None:
            (height, width), full = self._resizing.side(share), self._resizing.full
            return height * width / (full[0] * full[1])
        return share if self._length is not None else 1.0

    @contextmanager
    def at(self, session: Session, batch: Any, share: float) -> Iterator[Any]:
        """Make the batch smaller until the context ends; at 1, it is the batch itself."""
        small = self.enter(session, batch, share)
        try:
            yield small
        finally:
            self.leave()

    def enter(self, session: Session, batch: Any, share: float) -> Any:
        """Return the batch at ``share``, and let the module take it until :meth:`leave`."""
        if self._length is not None:
            return self._length.short(session, batch, share, self._shares)
        if self._resizing is None or share == 1.0:
            return batch
        small, side = self._resizing.at(batch, share)
        if small is not batch:
            self._resizing.enter(side)
        return small

    def renew(self) -> None:
        """Recompute what depends on weights, which may have changed."""
        if self._resizing is not None:
            self._resizing.renew()

    def leave(self) -> None:
        """Return to full inputs. A second call does nothing."""
        if self._resizing is not None:
            self._resizing.leave()
