"""0/1 Adam: signs from the start, ever rarer variance updates, then local steps (Lu et al. 2022, 2202.06009)."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.strategies._communication.exchange import Residuals
from lightning_eff.strategies._communication.onebit_optimizer import OneBitOptimizer


class ZeroOneAdam(OneBitOptimizer):
    """Updates the variance at growing intervals until ``freeze_step``, and then exchanges momenta at growing intervals.

    Until ``freeze_step``, every ``variance_interval`` steps gradients are averaged exactly and update the variance. In other
    steps they are sent as signs. The interval is 1 at first and doubles after every ``variance_updates`` updates.

    Then residuals are set to zero and the variance is frozen. Each rank does ``local_interval`` steps with its own momentum.
    After that, the sum ``u`` of ``lr m_hat`` is averaged through signs: ``theta = anchor - u / (sqrt(v_hat) + eps)`` and
    ``m = u / sum lr``. This interval doubles after every ``local_updates`` exchanges, up to ``max_local_interval``.

    Args:
        source: the user's Adam or AdamW.
        freeze_step: number of steps that can update the variance, >= 1.
        variance_updates: the paper's kappa, >= 1.
        local_updates: number of exchanges before the local interval doubles, >= 1.
        max_local_interval: largest number of local steps, >= 1.
    """

    def __init__(
        self,
        source: Optimizer,
        *,
        freeze_step: int,
        variance_updates: int = 16,
        local_updates: int = 32678,
        max_local_interval: int = 16,
    ) -> None:
        super().__init__(source, freeze_step=freeze_step)
        self.variance_updates = variance_updates
        self.local_updates = local_updates
        self.max_local_interval = max_local_interval
        self.counters: dict[str, int | float] = {
            "variance_interval": 1,
            "renewals": 0,  # of the variance, in all
            "renewals_here": 0,  # with this interval
            "local_interval": 1,
            "meetings_here": 0,
            "local_steps": 0,  # since ranks met
        }

    @property
    @override
    def wants_mean(self) -> bool:
        return self.steps < self.freeze_step and (self.steps + 1) % self.counters["variance_interval"] == 0

    @property
    @override
    def apart(self) -> bool:
        return self.counters["local_steps"] > 0

    @override
    def update(self) -> None:
        if self.steps <= self.freeze_step:
            self._common_step()
        else:
            self._local_step()
        if self.steps == self.freeze_step:
            self.freeze()
            self.residuals = Residuals()
            for _, p, _ in self.named():
                self.moments(p).update(anchor=p.detach().clone(), u=torch.zeros_like(p), rates=0.0)

    def _common_step(self) -> None:
        c = self.counters
        renews = self.steps % c["variance_interval"] == 0
        gradients = {name: self.gradient(p, group).clone() for name, p, group in self.named()}
        if renews:
            c["renewals"] += 1
            c["renewals_here"] += 1
        else:
            self.mean(gradients)
        for name, p, group in self.named():
            beta1, beta2 = group["betas"]
            state, g = self.moments(p), gradients[name]
            state["exp_avg"].lerp_(g, 1 - beta1)
            if renews:
                state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
            p.mul_(self.decay(group))
            denominator = self._denominator(p, group)
            p.addcdiv_(state["exp_avg"], denominator, value=-float(group["lr"]) / (1 - beta1**self.steps))
        if c["renewals_here"] == self.variance_updates:
            c["renewals_here"] = 0
            c["variance_interval"] *= 2

    def _local_step(self) -> None:
        c = self.counters
        c["local_steps"] += 1
        sums: dict[str, Tensor] = {}
        for name, p, group in self.named():
            beta1, _ = group["betas"]
            state, decay = self.state[p], self.decay(group)
            rate = float(group["lr"]) / (1 - beta1**self.steps)
            state["exp_avg"].lerp_(self.gradient(p, group), 1 - beta1)
            state["anchor"].mul_(decay)
            state["u"].mul_(decay).add_(state["exp_avg"], alpha=rate)
            state["rates"] = state["rates"] * decay + rate
            sums[name] = state["u"]
        meets = c["local_steps"] == c["local_interval"]
        if meets:
            self.mean(sums)
        for name, p, group in self.named():
            state = self.state[p]
            torch.addcdiv(state["anchor"], sums[name], self._denominator(p, group), value=-1.0, out=p)
            if meets:
                if state["rates"] > 0:
                    state["exp_avg"].copy_(sums[name]).div_(state["rates"])
                state["anchor"].copy_(p)
                state["u"].zero_()
                state["rates"] = 0.0
        if meets:
            c["local_steps"] = 0
            c["meetings_here"] += 1
            if c["meetings_here"] == self.local_updates:
                c["meetings_here"] = 0
                c["local_interval"] = min(c["local_interval"] * 2, self.max_local_interval)

    def _denominator(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        correction = 1 - group["betas"][1] ** max(self.counters["renewals"], 1)
        return (self.state[p]["exp_avg_sq"].sqrt() / math.sqrt(correction)).add_(group["eps"])

    @override
    def rank_state(self) -> dict[str, Any]:
        found = {**super().rank_state(), "counters": dict(self.counters), "apart": {}}
        if self.apart:
            for name, p, _ in self.named():
                own = p.detach() if self._own is None else self._own[name]
                kept = {"own": own, "exp_avg": self.state[p]["exp_avg"], "u": self.state[p]["u"]}
                found["apart"][name] = {key: value.to("cpu", copy=True) for key, value in kept.items()}
        return found

    @torch.no_grad()
    @override
    def load_rank_state(self, ranks: list[dict[str, Any]]) -> None:
        self.counters = dict(ranks[0]["counters"])
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if ranks[0]["apart"] and len(ranks) == world_size:
            mine = ranks[dist.get_rank() if dist.is_initialized() else 0]["apart"]
            for name, p, _ in self.named():
                p.copy_(mine[name]["own"])
                for key in ("exp_avg", "u"):
                    self.state[p][key].copy_(mine[name][key])
        elif ranks[0]["apart"]:  # other ranks: all start from the mean, as if they had just met
            self.counters["local_steps"] = 0
            for name, p, _ in self.named():
                mean = torch.stack([rank["apart"][name]["exp_avg"] for rank in ranks]).mean(dim=0)
                self.state[p]["exp_avg"].copy_(mean)
                self.state[p]["anchor"].copy_(p)
                self.state[p]["u"].zero_()
                self.state[p]["rates"] = 0.0
        super().load_rank_state(ranks)
