"""What the optimizers that send signs share: the user's parameter groups, means over ranks, state of each rank."""

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
    """Raise ValueError unless ``optimizer`` is a torch Adam or AdamW whose settings the 1-bit rules have a meaning for."""
    if type(optimizer) not in (Adam, AdamW):
        raise ValueError(
            f"{who}: configure_optimizers returned {type(optimizer).__name__}; expected torch.optim.Adam or AdamW, whose"
            " lr, betas, eps and weight_decay are taken over. Return one of them."
        )
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"{who}: {type(optimizer).__name__} has complex parameters, and momenta that travel as signs are of real ones."
            " Keep real parameters, as torch.view_as_real gives them, or take strategy='ddp'."
        )
    for group in optimizer.param_groups:
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                raise ValueError(
                    f"{who}: {type(optimizer).__name__}({name}=True) has no 1-bit form; expected {name}=False. Leave it out."
                )


class OneBitOptimizer(Optimizer, ABC):
    """An optimizer made of an Adam's parameter groups, which does its own communication once it is past its start.

    The groups are the source's own, so learning rate schedulers made for the source go on working. Matrices are sent as
    signs, vectors as they are. While ``wants_mean`` gradients must have been averaged over ranks before :meth:`step`,
    and must not have been otherwise.

    Args:
        source: the user's Adam or AdamW, without state.
        freeze_step: after so many steps the second moment stays what it is, >= 1.

    Attributes:
        steps: how many steps were made.
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
        """From now on steps count; those before are the engine's, to make buffers.

        Args:
            listener: is told after each step, and now, whether the next gradients must be averaged over ranks.
        """
        self._listener = listener
        listener(self.wants_mean)

    @property
    @abstractmethod
    def wants_mean(self) -> bool:
        """Whether the gradients of the next step must be the mean over ranks."""

    @abstractmethod
    def update(self) -> None:
        """Make step number ``self.steps``, which starts from 1."""

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
        """(name, parameter, group) of each parameter; names are ``group.index``."""
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                yield f"{i}.{j}", p, group

    def moments(self, p: Tensor) -> dict[str, Any]:
        """The state of ``p``, with moments of zeros to begin with."""
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        return state

    def gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient, zeros where there is none, with the L2 term where the source is an Adam with weight decay."""
        g = torch.zeros_like(p) if p.grad is None else p.grad
        if group["weight_decay"] and not group.get("decoupled_weight_decay"):
            g = g.add(p, alpha=group["weight_decay"])
        return g

    def decay(self, group: dict[str, Any]) -> float:
        """What weights are multiplied with before a step: ``1 - lr * weight_decay`` for an AdamW, else 1."""
        return 1 - float(group["lr"]) * group["weight_decay"] if group.get("decoupled_weight_decay") else 1.0

    def mean(self, tensors: dict[str, Tensor]) -> None:
        """Replace each tensor by its mean over ranks, matrices through signs and residuals."""
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
        """Make the second moments fit to stay: one that is zero would turn a sign into a step without bound.

        An element whose gradient was always zero so far (a token not met yet) gets the mean of its tensor, and a tensor
        without any gradient so far that of all.
        """
        moments = [self.moments(p)["exp_avg_sq"] for _, p, _ in self.named()]
        means = [v[v > 0].mean() if (v > 0).any() else None for v in moments]
        known = [mean for mean in means if mean is not None]
        for v, mean in zip(moments, means, strict=True):
            if known:
                v[v == 0] = torch.stack(known).mean() if mean is None else mean

    # -- state

    def rank_state(self) -> dict[str, Any]:
        """What :meth:`state_dict` does not hold: counters, and what is of this rank alone; on the CPU."""
        kept = self.residuals.to("cpu")
        return {"steps": self.steps, "worker": kept.worker, "server": kept.server}

    def load_rank_state(self, ranks: list[dict[str, Any]]) -> None:
        """Take over what all ranks of a run saved, of any number of ranks, after :meth:`load_state_dict`."""
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

    # -- weights that ranks may hold of their own

    @property
    def apart(self) -> bool:
        """Whether ranks hold different weights at the moment."""
        return False

    @torch.no_grad()
    def show_mean(self) -> None:
        """Put the mean over ranks into the weights, if they are apart and it is not there."""
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
