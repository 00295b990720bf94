"""The engine of augmentations that change the tokens of texts."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.batches import lies_at, map_tensors, tensors
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff.data.augmentation._engine import BASELINE, Augmentation
from lightning_eff.data.augmentation._lookups import lookups
from lightning_eff.data.augmentation._tokens import configured_special_tokens, found_tokens


class TextAugmentation(Augmentation):
    """Changes tokens of training texts, except for special tokens.

    Attributes:
        special_tokens: tokens that never change. None takes those of a Hugging Face config.
        labels: names or positions of the labels in the batch. None looks for them.
    """

    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    saves = "no time per step: it regularises, for a better model from few texts"
    control = BASELINE

    def __init__(
        self,
        *,
        prob: float,
        until: float,
        keys: Sequence[str | int] | None,
        special_tokens: Sequence[int] | None,
        labels: Sequence[str | int] | None,
    ) -> None:
        super().__init__(prob=prob, until=until, keys=keys)
        self.special_tokens = special_tokens
        self.labels = labels

    @override
    def _reset(self) -> None:
        super()._reset()
        self._checked = False

    # -- for subclasses

    def fits(self, batch: Any) -> None:
        """Raise ``ValueError`` if the tokens of the batch cannot be changed."""
        found_tokens(batch, self.keys, who=type(self).__name__)

    @abstractmethod
    def edit(
        self, step: Step, batch: Any, path: str, ids: Tensor, named: list[tuple[str, Tensor]], generator: Generator
    ) -> dict[str, Tensor]:
        """Return the new tokens, and other tensors that change with them, by path.

        Args:
            step: the step.
            batch: the batch as the loader returned it.
            path: the path of the tokens.
            ids: the tokens, (B, T).
            named: all tensors of the batch with their paths.
            generator: the generator of this micro-batch.
        """

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._targets = Targets(session, type(self).__name__, self.labels)

    def _protected(self, session: Session, *more: int) -> list[int]:
        """Return the special tokens and ``more``, ascending, and log them."""
        named = configured_special_tokens(session.module) if self.special_tokens is None else self.special_tokens
        found = sorted({*named, *more})
        rank_zero_info(f"{type(self).__name__}: tokens that never change: {found or 'none'}")
        return found

    @override
    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if not self._checked:
            on_all_ranks(self.session, lambda: self.fits(batch))
            if not self._targets.labels(step, batch):  # the step skips this batch
                self._note(0.0)
                return proceed(batch)
            on_all_ranks(self.session, lambda: self._read(step, batch))
            self._checked = True
        return super()._link(step, batch, proceed)

    def _read(self, step: Step, batch: Any) -> None:
        """Raise ``ValueError`` if the tokens, which no ``keys`` name, are looked up in no embedding: columns of categories."""
        found = found_tokens(batch, self.keys, who=type(self).__name__)
        unnamed = [ids for path, ids in found if self.keys is None and not lies_at(path, "input_ids")]
        if unnamed and not (calls := lookups(step, batch)).of(unnamed):
            raise calls.none(unnamed[0], who=type(self).__name__)

    @override
    def change(self, step: Step, batch: Any, generator: Generator) -> tuple[Any, float] | None:
        named = tensors(batch)
        made: dict[str, Tensor] = {}
        others = total = 0
        for path, ids in found_tokens(batch, self.keys, who=type(self).__name__):
            made |= self.edit(step, batch, path, ids, named, generator)
            others += int((made[path] != ids).sum())
            total += ids.numel()
        each = iter([made.get(path, t) for path, t in named])  # by path, because tokens and labels may be one tensor
        return map_tensors(batch, lambda t: next(each)), others / max(total, 1)
