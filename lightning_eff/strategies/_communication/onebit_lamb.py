"""1-bit LAMB: after a start as LAMB, it sends momenta as signs and scales frozen trust ratios (Li et al. 2021, 2104.06069)."""

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.strategies._communication.onebit_optimizer import OneBitOptimizer


class OneBitLamb(OneBitOptimizer):
    """LAMB for ``freeze_step`` steps, without bias correction and with weight decay inside the trust ratio; then 1-bit.

    After the start the trust ratio of a tensor is ``c r``. ``c`` is the moving average of its ratios in the start.
    ``r = max (sqrt(v) + eps) / (sqrt(v_fresh) + eps)``, with the frozen ``v``. ``v_fresh`` continues with gradients
    reconstructed as ``(m_t - beta1 m_{t-1}) / (1 - beta1)``. ``r`` stays in ``factor_range``, and changes by at most a
    fraction ``factor_threshold`` per step.

    Args:
        source: the user's Adam or AdamW, for lr, betas, eps and weight decay.
        freeze_step: number of LAMB steps, >= 1.
        ratio_range: smallest and largest trust ratio in the start.
        ratio_decay: decay of the moving average of ratios, in [0, 1).
        factor_range: smallest and largest ``r``.
        factor_threshold: > 0.
    """

    def __init__(
        self,
        source: Optimizer,
        *,
        freeze_step: int,
        ratio_range: tuple[float, float] = (0.01, 10.0),
        ratio_decay: float = 0.9,
        factor_range: tuple[float, float] = (0.5, 4.0),
        factor_threshold: float = 0.1,
    ) -> None:
        super().__init__(source, freeze_step=freeze_step)
        self.ratio_range = ratio_range
        self.ratio_decay = ratio_decay
        self.factor_range = factor_range
        self.factor_threshold = factor_threshold

    @property
    @override
    def wants_mean(self) -> bool:
        return self.steps < self.freeze_step

    @override
    def gradient(self, p: Tensor, group: dict) -> Tensor:
        return torch.zeros_like(p) if p.grad is None else p.grad  # weight decay is part of the update

    @override
    def update(self) -> None:
        if self.steps <= self.freeze_step:
            self._lamb_step()
        else:
            self._compressed_step()
        if self.steps == self.freeze_step:
            self.freeze()
            for _, p, _ in self.named():
                self.moments(p)["fresh"] = self.state[p]["exp_avg_sq"].clone()

    def _lamb_step(self) -> None:
        for _, p, group in self.named():
            if p.grad is None:
                continue
            beta1, beta2 = group["betas"]
            state, g = self.moments(p), self.gradient(p, group)
            state.setdefault("ratio", g.new_zeros(()))
            state.setdefault("factor", g.new_ones(()))
            state["exp_avg"].lerp_(g, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
            update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(group["eps"])
            update.add_(p, alpha=group["weight_decay"])
            # c_t = clip(|theta| / |update|)
            weights, length = p.norm(), update.norm()
            ratio = (weights / length).clamp(*self.ratio_range)
            ratio = torch.where((weights > 0) & (length > 0), ratio, 1.0)
            state["ratio"] = self.ratio_decay * state["ratio"] + (1 - self.ratio_decay) * ratio
            p.add_(update.mul_(ratio), alpha=-float(group["lr"]))

    def _compressed_step(self) -> None:
        momenta: dict[str, Tensor] = {}
        before: dict[str, Tensor] = {}
        for name, p, group in self.named():
            m = self.moments(p)["exp_avg"]
            before[name] = m.clone()
            momenta[name] = m.lerp_(self.gradient(p, group), 1 - group["betas"][0])
        self.mean(momenta)
        for name, p, group in self.named():
            beta1, beta2 = group["betas"]
            state, m = self.state[p], momenta[name]
            g = (m - beta1 * before[name]) / (1 - beta1)
            state["fresh"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
            denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
            factor = (denominator / state["fresh"].sqrt().add_(group["eps"])).max()
            bare = m / denominator
            update = bare.add(p, alpha=group["weight_decay"])
            if group["weight_decay"] > 0:
                length = update.norm()
                share = torch.where(length > 0, (bare.norm() / length).clamp(max=1.0), 1.0)
                factor = factor * share + 1 - share
            last = factor.new_ones(()) * state.get("factor", 1.0)
            factor = factor.clamp(*self.factor_range)
            factor = factor.clamp(last * (1 - self.factor_threshold), last * (1 + self.factor_threshold))
            state["factor"] = factor
            p.add_(update.mul_(factor * state.get("ratio", 1.0)), alpha=-float(group["lr"]))
