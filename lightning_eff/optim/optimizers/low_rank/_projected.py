"""The base of update rules that project each matrix's gradient to a low rank, and keep Adam's moments only there."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._matrices import Split
from lightning_eff.optim.optimizers._two_sided.folding import Fold, working
from lightning_eff.optim.optimizers._two_sided.rule import Kronecker

_WHOLE = 2**62  # the kernel of every convolution is merged into its inputs


class Projected(Kronecker):
    """Adam in a projection of each matrix; a subclass implements :meth:`direction`.

    A matrix has rows (out) and columns (in). Matrices whose shorter side is at most ``rank`` use AdamW, because a
    projection would save nothing there.

    Args:
        params: a module, its ``named_parameters()`` or ``parameters()``, or groups of them.
        defaults: defaults of the groups, with ``lr``, ``betas``, ``eps``, ``weight_decay``, ``rank`` and ``refresh_steps``.
        split: as in :class:`Muon`.

    Raises:
        ValueError: if no matrix has two sides longer than ``rank``, and as in :class:`Kronecker`.
    """

    divides: ClassVar[bool] = False

    def __init__(self, params: nn.Module | Iterable[Any], defaults: dict[str, Any], *, split: Split) -> None:
        self._numbers: dict[Tensor, int] = {}
        self._short: list[tuple[int, ...]] = []  # shapes of matrices with a side of at most `rank`
        try:
            super().__init__(params, defaults, split=split, merge=_WHOLE)
        except ValueError as error:
            if not self._short or self._folds:
                raise
            raise ValueError(
                f"{type(self).__name__}(rank={defaults['rank']}): no matrix has two sides longer than this (shapes"
                f" {self._short[:5]}{' ...' if len(self._short) > 5 else ''}), so nothing would be projected. Lower the rank,"
                " or use AdamW."
            ) from error

    @override
    def _fold_of(self, name: str | None, p: Tensor, algorithm: str | None) -> Fold | None:
        fold = super()._fold_of(name, p, algorithm)
        if fold is None:
            return None
        if any(min(piece.shape) <= self.param_groups[-1]["rank"] for piece in fold.apart(p)):
            self._short.append(tuple(p.shape))
            return None
        self._numbers[p] = len(self._numbers)
        return fold

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        return {"step": 0}

    @override
    def update_folded(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        for p, grad, state in zip(params, grads, states, strict=True):
            state["step"] += 1
            update = torch.empty(
                p.shape, dtype=working(p.dtype), device=p.device
            )  # contiguous, so that pieces are views
            fold = self._folds[p]
            for j, (G, into) in enumerate(zip(fold.apart(grad), fold.apart(update), strict=True)):
                into.copy_(self.direction(group, G.to(update.dtype), state, j, self._numbers[p]))
            if group["weight_decay"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(update.to(p.dtype), alpha=-group["lr"])

    def direction(self, group: dict[str, Any], G: Tensor, state: dict[str, Any], j: int, number: int) -> Tensor:
        """Return the update of one matrix, before the learning rate, and move its state on.

        Args:
            group: its parameter group.
            G: its gradient, (out, in), in the working dtype.
            state: the state of its parameter; ``step`` is 1 at the first step.
            j: its index in the parameter.
            number: the index of the parameter among those that are projected.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_numbers": self._numbers, "_short": self._short}


def adam_direction(group: dict[str, Any], R: Tensor, state: dict[str, Any], j: int) -> Tensor:
    """``M^ / (sqrt(V^) + eps)`` of a projected gradient ``R``; moves the moments in ``state`` on."""
    (b1, b2), t = group["betas"], state["step"]
    if f"exp_avg_{j}" not in state:
        state[f"exp_avg_{j}"], state[f"exp_avg_sq_{j}"] = torch.zeros_like(R), torch.zeros_like(R)
    M, V = state[f"exp_avg_{j}"], state[f"exp_avg_sq_{j}"]
    # M := b1 M + (1 - b1) R;  V := b2 V + (1 - b2) R^2
    lists.lerp_([M], [R], 1 - b1)
    V.mul_(b2).addcmul_(R, R, value=1 - b2)
    return (M / (1 - b1**t)).div_((V / (1 - b2**t)).sqrt_().add_(group["eps"]))
