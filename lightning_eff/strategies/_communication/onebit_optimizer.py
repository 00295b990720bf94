"""The base class of optimizers that send signs: the user's parameter groups, means over ranks, and state per rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override

from lightning_eff.strategies._communication.codecs import SignCodec
from lightning_eff.strategies._communication.exchange import (
    Residuals,
    Traffic,
    as_matrix,
    compressed_mean,
    plain_mean,
    redistribute,
)


def check_source(optimizer: Optimizer, *, who: str) -> None:
    """Raise ValueError unless ``optimizer`` is a torch Adam or AdamW with settings that the 1-bit rules support."""
    if type(optimizer) not in (Adam, AdamW):
        raise ValueError(
            f"{who}: configure_optimizers returned {type(optimizer).__name__}, but the 1-bit optimizer replaces an Adam. Return"
            " torch.optim.Adam or AdamW, for its lr, betas, eps and weight_decay."
        )
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"{who}: {type(optimizer).__name__} has complex parameters, but only real momenta can be sent as signs."
            " Use real parameters (torch.view_as_real), or strategy='ddp'."
        )
    for group in optimizer.param_groups:
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                raise ValueError(
                    f"{who}: {type(optimizer).__name__}({name}=True) has no 1-bit form. Remove {name}=True."
                )


class OneBitOptimizer(Optimizer, ABC):
    """An optimizer with an Adam's parameter groups that communicates itself after its start.

    It uses the source's groups, so learning rate schedulers of the source still work. It sends matrices as signs, and vectors
    unchanged. Gradients must be averaged over ranks before :meth:`step` if ``wants_mean``, and must not be otherwise.

    Args:
        source: the user's Adam or AdamW, without state.
        freeze_step: number of steps before the second moment is frozen, >= 1.

    Attributes:
        steps: number of steps so far.
        traffic: bytes that the last step sent.
    """

    def __init__(self, source: Optimizer, *, freeze_step: int) -> None:
        super().__init__(source.param_groups, source.defaults)
        self.source = source
        self.param_groups = source.param_groups
        source._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # what its schedulers ask for
        self.freeze_step = freeze_step
        self.steps = 0
        self.residuals = Residuals()
        self.traffic = Traffic()
        self._listener: Callable[[bool], None] | None = None
        self._own: dict[str, Tensor] | None = None

    def begin(self, listener: Callable[[bool], None]) -> None:
        """Start counting steps; earlier ones are the engine's, which creates buffers.

        Args:
            listener: called now and after each step with whether the next gradients must be averaged over ranks.
        """
        self._listener = listener
        listener(self.wants_mean)

    @property
    @abstractmethod
    def wants_mean(self) -> bool:
        """Whether the gradients of the next step must be the mean over ranks."""

    @abstractmethod
    def update(self) -> None:
        """Do step number ``self.steps``, which starts at 1."""

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._listener is None:
            return loss
        self.traffic = Traffic()
        num_bytes = sum(p.numel() * p.element_size() for _, p, _ in self.named())
        self.traffic.instead_of(num_bytes, _world_size())
        if self.wants_mean:
            self.traffic.all_reduce(num_bytes, _world_size())
        self.steps += 1
        self.update()
        self._listener(self.wants_mean)
        return loss

    # -- pieces of the rules

    def named(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield (name, parameter, group) of each parameter; names are ``group.index``."""
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                yield f"{i}.{j}", p, group

    def moments(self, p: Tensor) -> dict[str, Any]:
        """Return the state of ``p``, initially with zero moments."""
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        return state

    def gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the gradient or zeros, plus the L2 term if the source is an Adam with weight decay."""
        g = torch.zeros_like(p) if p.grad is None else p.grad
        if group["weight_decay"] and not group.get("decoupled_weight_decay"):
            g = g.add(p, alpha=group["weight_decay"])
        return g

    def decay(self, group: dict[str, Any]) -> float:
        """Return the factor of weights before a step: ``1 - lr * weight_decay`` for an AdamW, else 1."""
        return 1 - float(group["lr"]) * group["weight_decay"] if group.get("decoupled_weight_decay") else 1.0

    def mean(self, tensors: dict[str, Tensor]) -> None:
        """Replace each tensor by its mean over ranks; matrices are sent as signs with residuals."""
        if _world_size() == 1:
            return
        plain_mean([x for x in tensors.values() if x.ndim < 2], group=None, traffic=self.traffic)
        matrices = {name: as_matrix(x) for name, x in tensors.items() if x.ndim >= 2}
        means = compressed_mean(
            matrices, SignCodec(), group=None, residuals=self.residuals, seed=lambda key: 0, traffic=self.traffic
        )
        for name, mean in means.items():
            tensors[name].copy_(mean.view_as(tensors[name]))

    def freeze(self) -> None:
        """Prepare the second moments for freezing, because a zero would turn a sign into an unbounded step.

        An element whose gradients were all zero (a token that has not occurred) gets the mean of its tensor. A tensor without
        gradients gets the mean of all tensors.
        """
        moments = [self.moments(p)["exp_avg_sq"] for _, p, _ in self.named()]
        means = [v[v > 0].mean() if (v > 0).any() else None for v in moments]
        known = [mean for mean in means if mean is not None]
        for v, mean in zip(moments, means, strict=True):
            if known:
                v[v == 0] = torch.stack(known).mean() if mean is None else mean

    # -- state

    def rank_state(self) -> dict[str, Any]:
        """Return counters and this rank's own state, which :meth:`state_dict` does not have, on the CPU."""
        kept = self.residuals.to("cpu")
        return {"steps": self.steps, "worker": kept.worker, "server": kept.server}

    def load_rank_state(self, ranks: list[dict[str, Any]]) -> None:
        """Load the states of all ranks of a run, of any number, after :meth:`load_state_dict`."""
        self.steps = ranks[0]["steps"]
        saved = [Residuals(state["worker"], state["server"]) for state in ranks]
        device = self.param_groups[0]["params"][0].device
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.residuals = redistribute(saved, rank, _world_size()).to(device)
        if self._listener is not None:
            self._listener(self.wants_mean)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.source.param_groups = self.param_groups

    # -- weights that differ between ranks

    @property
    def apart(self) -> bool:
        """Whether ranks have different weights now."""
        return False

    @torch.no_grad()
    def show_mean(self) -> None:
        """Put the mean over ranks into the weights, if they differ and do not have it yet."""
        if self._own is None and self.apart and _world_size() > 1:
            self._own = {name: p.detach().clone() for name, p, _ in self.named()}
            plain_mean([p.detach() for _, p, _ in self.named()], group=None, traffic=Traffic())

    @torch.no_grad()
    def show_own(self) -> None:
        """Put this rank's weights back."""
        for name, p, _ in self.named():
            if self._own is not None:
                p.copy_(self._own[name])
        self._own = None


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
