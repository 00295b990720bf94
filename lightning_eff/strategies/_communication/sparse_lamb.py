"""LAMB whose ranks average a random part of their momenta in each step: the optimizer of :class:`SLAMB`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.strategies._communication.exchange import Traffic, plain_mean


def trust_ratio(w: Tensor, u: Tensor, *, empty: float) -> Tensor:
    """Return ``|w| / |u|``, a scalar; ``empty`` if one of the norms is zero."""
    of_w, of_u = torch.linalg.vector_norm(w), torch.linalg.vector_norm(u)
    return torch.where((of_w > 0) & (of_u > 0), of_w / of_u, empty)


class SparseLamb(Optimizer):
    """LAMB with moments of each rank's own gradients, and first moments that are averaged in parts.

    The rule for a tensor w is in :class:`lightning_eff.strategies.slamb.SLAMB`.

    Args:
        params: parameter groups with lr, betas, eps and weight_decay.
        ratio: the fraction of the elements of a large tensor that is averaged in each step.
        decay: ``b3``, the decay factor of the freshness of other elements.
        trust_range: the smallest and the largest trust ratio of the averaged elements; the largest also holds for the others.
        min_size: the number of elements below which a tensor is averaged whole, as vectors are.

    Attributes:
        ranks: how many ranks average in the next step. With 1, all elements count as averaged, so the step is LAMB's.
        seed: returns the seed of a tensor's mask in the next step from the tensor's index; the same on all ranks.
        traffic: the bytes that this rank sent in the last step.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        ratio: float,
        decay: float,
        trust_range: tuple[float, float],
        min_size: int,
    ) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0})
        self.ratio, self.decay, self.trust_range, self.min_size = ratio, decay, trust_range, min_size
        self.ranks = 1
        self.seed: Callable[[int], int] = lambda index: index
        self.traffic = Traffic()

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = ((p, group) for group in self.param_groups for p in group["params"])
        moved = [(i, p, group) for i, (p, group) in enumerate(every) if p.grad is not None]
        for _, p, group in moved:
            self._accumulate(p, group)
        masks = self._exchange([(i, p) for i, p, _ in moved])
        for (_, p, group), mask in zip(moved, masks, strict=True):
            self._move(p, group, mask)
        return loss

    def _accumulate(self, p: Tensor, group: dict[str, Any]) -> None:
        state, g = self.state[p], p.grad
        assert g is not None
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        b1, b2 = group["betas"]
        state["step"] += 1
        # m := b1 m + (1 - b1) g;  v := b2 v + (1 - b2) g^2
        state["exp_avg"].lerp_(g, 1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)

    def _exchange(self, moved: list[tuple[int, Tensor]]) -> list[Tensor | None]:
        """Average the masked first moments over ranks, and return the masks; None where all elements are averaged."""
        self.traffic = Traffic()
        masks = [self._mask(i, p) for i, p in moved]
        if self.ranks > 1:
            self.traffic.instead_of(sum(p.numel() * p.element_size() for _, p in moved), self.ranks)
            momenta = [self.state[p]["exp_avg"] for _, p in moved]
            some = [m if mask is None else m[mask] for m, mask in zip(momenta, masks, strict=True)]
            plain_mean(some, group=None, traffic=self.traffic)
            for m, mask, mean in zip(momenta, masks, some, strict=True):
                if mask is not None:
                    m[mask] = mean
        return masks

    def _mask(self, index: int, p: Tensor) -> Tensor | None:
        """Draw which elements are averaged in this step, and update the freshness of all; None for all."""
        state = self.state[p]
        if self.ranks == 1 or self.ratio >= 1 or p.ndim < 2 or p.numel() < self.min_size:
            state.pop("fresh", None)
            return None
        generator = torch.Generator(p.device).manual_seed(self.seed(index))
        mask = torch.rand(p.shape, generator=generator, device=p.device, dtype=torch.float32) < self.ratio
        # r := b3 r, and 1 where the mask is
        fresh = state["fresh"] if "fresh" in state else torch.ones_like(p)
        state["fresh"] = torch.where(mask, 1.0, fresh * self.decay)
        return mask

    def _move(self, p: Tensor, group: dict[str, Any], mask: Tensor | None) -> None:
        state, (b1, b2), lr = self.state[p], group["betas"], float(group["lr"])
        lowest, highest = self.trust_range
        # u := m^ / (sqrt(v^) + eps) + lambda w
        u = (state["exp_avg_sq"].sqrt() / (1 - b2 ** state["step"]) ** 0.5).add_(group["eps"])
        u = (state["exp_avg"] / (1 - b1 ** state["step"])).div_(u)
        if group["weight_decay"]:
            u.add_(p, alpha=group["weight_decay"])
        if mask is None:
            p.sub_(u.mul_(lr * trust_ratio(p, u, empty=1.0).clamp(lowest, highest)))
            return
        fresh = lr * trust_ratio(p * mask, u * mask, empty=1.0).clamp(lowest, highest)
        stale = lr * self.ranks**-0.5 * trust_ratio(p * ~mask, u * ~mask, empty=0.0).clamp(max=highest)
        # w := w - (r phi lr + (1 - r) phi' lr / sqrt(N)) u
        p.sub_(u.mul_(stale + (fresh - stale) * state["fresh"]))
