"""The base class of techniques that let DDP ranks train separately and average their weights at intervals."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core.session import Session
from lightning_eff._core.technique import OtherWeights
from lightning_eff.strategies._communication.exchange import Traffic, plain_mean
from lightning_eff.strategies._communication.gathering import gather_on_first
from lightning_eff.strategies._communication.hooks import refuse_hook


def average_in_place(parameters: list[Parameter]) -> None:
    """Compute ``w <- (1/N) sum_i w_i`` over all ranks, in place.

    Args:
        parameters: the parameters, with equal shapes and order on all ranks. They include those without a gradient, because
            a rank that sends less than others would block them forever.
    """
    if dist.get_world_size() > 1:
        plain_mean([p.detach() for p in parameters], group=None, traffic=Traffic())


class Apart(OtherWeights):
    """Trains each rank on its own gradients after a warm-up, and averages the weights every ``interval`` local steps.

    A subclass can average differently by overriding :meth:`mean`, at other times by overriding :meth:`due`, and do more than
    average by overriding :meth:`meet`. Validation, checkpoints and the end of the fit see the average. The callback's state
    holds each rank's own weights and optimizer state, so a resumed run equals an uninterrupted one.

    Attributes:
        interval: the number of local steps between two averagings.
        warmup_steps: the number of plain DDP steps at the start of the run.
    """

    needs: ClassVar[Need] = Need.DDP
    interval: int
    warmup_steps: int | float
    sparse_gradients: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"warmup_steps": math.inf}

    def _take(self, interval: int, warmup_steps: int | float) -> None:
        """Keep the arguments that all subclasses have."""
        self.interval, self.warmup_steps = interval, warmup_steps

    def mean(self, session: Session, parameters: dict[str, Parameter]) -> None:
        """Average these parameters, by name, in place. The result is the same on all ranks."""
        average_in_place([*parameters.values()])

    def due(self, session: Session) -> bool:
        """Return whether ranks meet after the local step that was just made. The answer is the same on all ranks."""
        return not self._apart

    def meet(self, session: Session) -> None:
        """Give all ranks the same weights."""
        self._average(session)

    def _reset(self) -> None:
        self._steps = 0  # optimizer steps of the run
        self._seen = 0  # the trainer's count of them when the batch began
        self._averagings = 0
        self._own: dict[str, Tensor] | None = None  # this rank's weights, while the module holds the mean
        self._pending: dict[str, Any] | None = None  # from a checkpoint
        self._wrapped: dict[str, Parameter] = {}  # those that trained when DDP was built
        self._hook: Any = None  # torch's PostLocalSGDState
        self._distributed = False
        self._finished = False

    # -- the run

    @property
    def local_steps(self) -> int:
        """The number of local steps so far."""
        return int(max(0, self._steps - self.warmup_steps))

    @property
    def _apart(self) -> bool:
        """Whether ranks hold different weights."""
        return self.local_steps % self.interval != 0

    @override
    def check(self, session: Session) -> None:
        strategy = session.trainer.strategy
        if getattr(session.trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"{type(self).__name__}: got precision {session.trainer.precision!r}, whose gradient scaler would skip a step"
                " on one rank and not on another. Use precision='bf16-mixed'."
            )
        refuse_hook(strategy, who=type(self).__name__)

    @override
    def attach(self, session: Session) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local_sgd

        strategy = session.trainer.strategy
        if not is_a(strategy, DDPStrategy):
            return
        wrap, load, state_dict = strategy.configure_ddp, strategy.load_checkpoint, strategy.lightning_module_state_dict

        def configure_ddp() -> None:
            if self._distributed:  # DDP is rebuilt during the run, which would give all ranks the weights of rank 0
                self._average(session)
            wrap()
            model = strategy.model
            assert isinstance(model, DistributedDataParallel)
            self._distributed, self._wrapped = True, self._parameters(session)
            self._hook = post_local_sgd.PostLocalSGDState(
                None, None, self.warmup_steps, post_local_gradient_allreduce=False
            )
            model.register_comm_hook(self._hook, post_local_sgd.post_localSGD_hook)

        def load_checkpoint(*args: Any, **kwargs: Any) -> dict[str, Any]:
            checkpoint = load(*args, **kwargs)
            saved = checkpoint.get("callbacks", {}).get(self.state_key)
            if session.fitting and saved and len(saved["optimizers"]) == session.trainer.world_size:
                checkpoint["optimizer_states"] = saved["optimizers"][session.rank]
            return checkpoint

        def mean_state_dict() -> dict[str, Any]:
            if self._own is not None or not self._apart or not self._distributed:
                return state_dict()
            with self.shown(session):
                return deepcopy(state_dict())  # tied weights stay one tensor

        session.patches.set(strategy, "configure_ddp", configure_ddp)
        session.patches.set(strategy, "load_checkpoint", load_checkpoint)
        session.patches.set(strategy, "lightning_module_state_dict", mean_state_dict)

    @override
    def on_optimizers(self, session: Session) -> None:
        weights = self._pending["weights"] if self._pending is not None else []
        if len(weights) == session.trainer.world_size:
            self._write(session, weights[session.rank])
        self._pending = None

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._seen = session.trainer.global_step
        if self._hook is not None:
            self._hook.iter = self._steps

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self._steps += session.trainer.global_step - self._seen
        if session.trainer.global_step > self._seen and self.local_steps and self.due(session):
            self.meet(session)

    def _average(self, session: Session) -> None:
        if self._distributed:  # including those that another technique has just frozen
            self.mean(session, self._wrapped | self._parameters(session))
            self._averagings += 1

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        self._hook, self._wrapped = None, {}

    # -- the mean, for validation and checkpoints

    def _parameters(self, session: Session) -> dict[str, Parameter]:
        return {name: p for name, p in session.module.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def _write(self, session: Session, weights: dict[str, Tensor]) -> None:
        parameters = dict(session.module.named_parameters())
        for name, w in weights.items():
            parameters[name].copy_(w)

    @override
    @torch.no_grad()
    def put_in(self, session: Session) -> None:
        """Put the mean over ranks into the module, unless it is there already."""
        if self._own is None and self._apart and self._distributed:
            parameters = self._parameters(session)
            self._own = {name: p.detach().clone() for name, p in parameters.items()}
            self.mean(session, parameters)

    @override
    def take_out(self, session: Session) -> None:
        """Put this rank's own weights back."""
        if self._own is not None:
            self._write(session, self._own)
        self._own = None

    # -- Lightning's hooks

    @override
    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        found: dict[str, Any] = {"steps": self._steps, "averagings": self._averagings, "weights": [], "optimizers": []}
        if session is None or not self._distributed or session.trainer.world_size == 1 or not self.local_steps:
            return found
        own = _on_cpu(self._own or self._parameters(session)) if self._apart else None
        optimizers = [_on_cpu(optimizer.state_dict()) for optimizer in session.optimizers]
        ranks = gather_on_first((own, optimizers), session.trainer.strategy.root_device)
        if ranks is not None:
            found["weights"] = [weights for weights, _ in ranks] if self._apart else []
            found["optimizers"] = [states for _, states in ranks]
        return found

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.neutral or (self._session is not None and not self._session.fitting):
            return  # validation and tests use the mean
        self._steps, self._averagings = state_dict["steps"], state_dict["averagings"]
        self._pending = state_dict

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"local_steps": self.local_steps, "averagings": self._averagings}


def _on_cpu(value: Any) -> Any:
    """Return ``value`` with copies of its tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list | tuple) else value
