"""1-bit Adam: after a start as Adam, it freezes the variance and sends momenta as signs (Tang et al. 2021, 2102.02888)."""

import math

from torch import Tensor
from typing_extensions import override

from lightning_eff.strategies._communication.onebit_optimizer import OneBitOptimizer


class OneBitAdam(OneBitOptimizer):
    """Adam for ``freeze_step`` steps; then it averages momenta instead of gradients, as signs with error feedback.

    ``m_i <- beta1 m + (1 - beta1) g_i``, ``m <- C(mean_i C(m_i + e_i) + E)``,
    ``theta <- theta - lr m_hat / (sqrt(v_hat) + eps)``, where ``v_hat`` comes from step ``freeze_step``. Bias corrections and
    weight decay are those of the source, so the start equals the user's Adam or AdamW.
    """

    @property
    @override
    def wants_mean(self) -> bool:
        return self.steps < self.freeze_step

    @override
    def update(self) -> None:
        frozen = self.steps > self.freeze_step
        momenta: dict[str, Tensor] = {}
        for name, p, group in self.named():
            if p.grad is None and not frozen:
                continue
            beta1, beta2 = group["betas"]
            state, g = self.moments(p), self.gradient(p, group)
            state["exp_avg"].lerp_(g, 1 - beta1)
            if not frozen:
                state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
            momenta[name] = state["exp_avg"]
        if frozen:
            self.mean(momenta)
        for name, p, group in self.named():
            if name not in momenta:
                continue
            beta1, beta2 = group["betas"]
            p.mul_(self.decay(group))
            denominator = self.state[p]["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2 ** min(self.steps, self.freeze_step))
            p.addcdiv_(
                momenta[name], denominator.add_(group["eps"]), value=-float(group["lr"]) / (1 - beta1**self.steps)
            )
        if self.steps == self.freeze_step:
            self.freeze()
