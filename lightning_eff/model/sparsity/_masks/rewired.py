"""Masks that change during the run: some weights are dropped, and as many others grow from zero."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._run.delayed_start import ActsLate, Length
from lightning_eff._core.session import Session
from lightning_eff.model.sparsity._masks.allotting import allotted
from lightning_eff.model.sparsity._masks.finding import largest
from lightning_eff.model.sparsity._masks.masked import Masked, agreed

_OTHER_BASES = ("SOAP", "Shampoo")


def drop_and_grow(magnitude: Tensor, growth: Tensor, kept: Tensor, fraction: float) -> Tensor:
    """The next mask, which keeps as many elements as ``kept``.

    It drops the ``k = floor(fraction |kept|)`` kept elements with the smallest ``magnitude``. Of all elements that are not
    kept then, including the dropped ones, the ``k`` with the largest ``growth`` grow.

    Args:
        magnitude: ``|w|``, (n,).
        growth: the score by which elements grow, (n,), such as the gradient's magnitude.
        kept: the mask, (n,).
        fraction: in [0, 1].
    """
    count = int(kept.sum())
    k = int(fraction * count)
    # θ ← ArgTopK(|θ|, n − k) of the kept elements
    stay = largest(magnitude.masked_fill(~kept, -torch.inf), count - k)
    # grow ArgTopK_{i ∉ θ}(growth, k)
    return stay | largest(growth.masked_fill(stay, -torch.inf), k)


def random_masks(technique: Masked, session: Session) -> dict[str, Tensor]:
    """A random mask for each weight, with its number of blocks."""
    counts = allotted(technique.weights, technique.sparsity, technique.distribution, technique.block)
    generator = session.generator("masks")
    masks: dict[str, Tensor] = {}
    for name, weight in technique.weights.items():
        drawn = torch.rand(weight.num_blocks(technique.block), generator=generator, dtype=torch.float64)
        masks[name] = weight.spread(largest(drawn, counts[name]), technique.block)
    return masks


class Rewired(ActsLate, Masked):
    """A technique whose masks start at random and change in part every ``interval`` optimizer steps.

    Attributes:
        interval: the number of optimizer steps between two changes.
        until: the fraction of the budget after which masks stay.
    """

    interval: int
    until: float
    needs_budget: ClassVar[bool] = True
    saves = "no time on today's hardware: it trains a sparse network in one training"
    constraints = "optimizers with separate moments for each weight"

    @override
    def _reset(self) -> None:
        super()._reset()
        self._moved = self._changes = 0
        self._growth: dict[str, Tensor] = {}
        self._made: list[int] = []  # steps of each optimizer, under manual optimization

    @abstractmethod
    def share(self, u: float) -> float:
        """The fraction of the kept weights that moves when a fraction ``u`` of the budget is used."""

    @abstractmethod
    def growth(self, session: Session, name: str, step: int) -> Tensor | None:
        """The scores by which elements of a weight grow, in its shape; None leaves its mask unchanged."""

    @override
    def asked(self) -> dict[str, Any]:
        return {**super().asked(), "interval": self.interval, "until": self.until}

    @override
    def on_optimizers(self, session: Session) -> None:
        super().on_optimizers(session)
        for one in session.optimizers:
            parts: list[Optimizer] = getattr(one, "parts", [one])
            for part in parts:
                if type(part).__name__ in _OTHER_BASES:
                    raise ValueError(
                        f"{type(self).__name__}: {type(part).__name__} keeps moments of sums of weights, so those of a single"
                        " weight cannot be set to zero. Use an optimizer such as AdamW or SGD, or remove the callback."
                    )

    @override
    def begin(self, session: Session, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return random_masks(self, session)

    def _due(self, session: Session, optimizer: Optimizer) -> int:
        """The number of this optimizer's next step if masks of its weights change then, else 0."""
        if session.module.automatic_optimization:
            step = session.trainer.global_step + 1
        else:  # the trainer counts the steps of all optimizers together
            self._made += [0] * (len(session.optimizers) - len(self._made))
            step = self._made[_index(session, optimizer)] + 1
        idle = not self.masks or step % self.interval or session.progress.u >= self.until
        return 0 if idle else step

    @override
    def undecided(self, session: Session) -> Collection[str]:
        return {name for o in session.optimizers if self._due(session, o) for name in self.names_of(o)}

    @override
    def before_step(self, session: Session, optimizer: Optimizer) -> None:
        step = self._due(session, optimizer)
        for name in self.names_of(optimizer):
            growth = self.growth(session, name, step) if step else None
            self._growth.pop(name, None)
            if growth is not None:
                self._growth[name] = growth

    @override
    @torch.no_grad()
    def after_step(self, session: Session, optimizer: Optimizer) -> None:
        if not session.module.automatic_optimization:
            self._due(session, optimizer)
            self._made[_index(session, optimizer)] += 1
        names = [name for name in self.names_of(optimizer) if name in self._growth]
        if not names:
            return
        share, block = self.share(session.progress.u), self.block
        new, changed = dict(self.masks), dict[str, Tensor]()
        for name in names:
            weight, mask = self.weights[name], self.masks[name]
            magnitude = agreed(session, self.parameter(name).detach().abs())
            kept = weight.pool(mask.float(), block) > 0
            after = drop_and_grow(
                weight.pool(magnitude, block), weight.pool(self._growth.pop(name), block), kept, share
            )
            new[name] = weight.spread(after, block)
            changed[name] = new[name] ^ mask
        self._tell(changed)
        self.put(new, changed)
        self.clear_state(session, changed)

    def _tell(self, changed: Mapping[str, Tensor]) -> None:
        self._moved = sum(int(one.sum()) for one in changed.values()) // 2
        self._changes += 1

    # -- reports and state

    @property
    @override
    def acted(self) -> bool:
        return self._changes > 0

    @override
    def will_act(self, length: Length) -> bool:
        return length.times(self.interval, until=self.until) > 0

    @override
    def idle(self, length: Length) -> str:
        until = f", up to until={self.until} of the run" if self.until < 1 else ""
        return (
            f"masks change every {self.interval:,}{until}, so they keep their random start. Give a smaller `interval`."
        )

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "moved": self._moved, "changes": self._changes}

    @override
    def summary(self) -> str:
        return f"{super().summary()}; masks changed {self._changes:,} times, and {self._moved:,} elements moved the last time"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "moved": [self._moved, self._changes], "made": list(self._made)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._moved, self._changes = state_dict["moved"]
        self._made = list(state_dict.get("made", []))  # checkpoints of earlier versions have none


def _index(session: Session, optimizer: Optimizer) -> int:
    return next(i for i, o in enumerate(session.optimizers) if o is optimizer)


def drawn(session: Session, who: str, name: str, step: int, like: Tensor) -> Tensor:
    """Random numbers in [0, 1) with the shape of ``like``, the same on all ranks and after a resume."""
    generator = session.generator(who, step, name)
    return torch.rand(like.shape, generator=generator, dtype=torch.float32).to(like.device)
