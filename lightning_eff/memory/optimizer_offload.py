"""Optimizer offloading: states and update on the host (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840)."""

import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, ClassVar

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core.search_space import RunProfile, SearchSpace, needs_memory_bound
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.memory._hosting.update import HostUpdate, check_optimizer


def _pointless(profile: RunProfile) -> str | None:
    if profile.accelerator == "cpu":
        return "the device is the host, so there is nothing to offload from"
    if not profile.optimizer_states:
        return "the optimizer has no states"
    return needs_memory_bound(profile)


def _step_of(update: HostUpdate, plain: Any) -> Callable[..., Any]:
    """Return the host step as a function of the optimizer, since a scheduler that is created later inspects a method."""

    @functools.wraps(getattr(plain, "__func__", plain))
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return update.step(*args, **kwargs)

    return step


class OptimizerOffload(Technique):
    """Keep the optimizer states in host memory and update the weights there, as in ZeRO-Offload.

    The forward and backward pass, accumulation, clipping and gradient unscaling run on the device as before. Then the gradients
    are copied to the host, the module's own optimizer steps there on copies of the parameters, and the updated parameters are
    copied back. The device stores weights and gradients, but no states: 8 of the 16 bytes per weight of AdamW in float32.

    Use it when optimizer states do not fit on the device. It pays off for long steps (large or accumulated batches), because
    each step copies 4 bytes per weight each way and runs the update on the CPU, with torch's fused kernels where available. On
    a CPU it saves nothing, runs bit-identically to plain training, and warns.

    The optimizer stays the same object, so schedulers and hooks work, and its ``state_dict`` has the usual form. A run can
    therefore be resumed with or without the technique. Parameters keep their precision; bfloat16 ones get no float32 copy.
    Under DDP, each rank has its own host copy.

    It logs ``bytes_to_host`` and ``bytes_to_device`` of the last step, ``state_bytes``, which the device does not hold, and
    ``seconds``, the time of the last step with its copies.

    Args:
        pin_memory: whether to use pinned host memory for gradients and parameter copies on CUDA. torch rounds each tensor up
            to a power of two bytes.

    Raises:
        ValueError: at setup, if an optimizer is not one of torch.optim's own that need only gradients, is capturable or
            differentiable, has settings that are tensors on the device, or unscales gradients itself.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, accumulate_grad_batches=8, callbacks=[OptimizerOffload()])

    References:
        Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv:2101.06840.
    """

    saves: ClassVar[str] = (
        "device memory of optimizer states (8 of 16 bytes per weight with AdamW), at the cost of time per step"
    )
    paper: ClassVar[str] = "Ren et al. 2021, arXiv:2101.06840"
    refuses: ClassVar[Reasons] = {
        **dict.fromkeys((Part.FLAT, Part.ENGINE), "the strategy has its own offloading"),
        Part.PIPELINE: "the technique loads the optimizer state of all weights, of which each process has some",
    }
    constraints: ClassVar[str] = "needs an optimizer of torch.optim other than LBFGS, and an accelerator"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(pointless=_pointless)
    control: ClassVar[Control] = Control("the baseline for the same time, since each step is the plain optimizer's")
    conflicts: ClassVar[Mapping[str, str]] = {
        "StochasticRoundingBF16": "it runs each optimizer step itself, on the device"
    }
    needs_automatic_optimization: ClassVar[bool] = False

    def __init__(self, *, pin_memory: bool = True) -> None:
        self.pin_memory = pin_memory

    def _reset(self) -> None:
        self._updates: list[HostUpdate] = []
        self._last: dict[str, float] = {}

    @override
    def on_optimizers(self, session: Session) -> None:
        scaled = getattr(session.trainer.precision_plugin, "scaler", None) is not None
        for optimizer in session.optimizers:
            check_optimizer(optimizer, scaled=scaled)
        for optimizer in session.optimizers:
            update = HostUpdate(optimizer, pin_memory=self.pin_memory)
            session.patches.set(optimizer, "step", MethodType(_step_of(update, optimizer.step), optimizer))
            session.patches.set(optimizer, "load_state_dict", update.load_state_dict)
            self._updates.append(update)
        if not any(update.on_accelerator for update in self._updates):
            rank_zero_warn(
                "OptimizerOffload: nothing is gained on a CPU, because parameters are in host memory already. Remove it.",
                category=PossibleUserWarning,
            )
        strategy = session.trainer.strategy

        def load_optimizer_state_dict(checkpoint: Any) -> None:
            """Load the states; Lightning's own method would then move them to the device."""
            for optimizer, state in zip(strategy.optimizers, checkpoint["optimizer_states"], strict=False):
                optimizer.load_state_dict(state)

        session.patches.set(strategy, "load_optimizer_state_dict", load_optimizer_state_dict)

    @override
    def detach(self, session: Session) -> None:
        self._last = self._quantities()
        self._updates = []

    def _quantities(self) -> dict[str, float]:
        if not self._updates:
            return self._last
        names = ("bytes_to_host", "bytes_to_device", "state_bytes", "seconds")
        return {name: sum(getattr(update, name) for update in self._updates) for name in names}

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._quantities())

    @override
    def summary(self) -> str:
        found = self._quantities()
        if not found:
            return "made no step"
        held, took = found["state_bytes"] / 2**20, found["seconds"] * 1000
        return f"kept {held:,.2f} MiB of optimizer states on the host; the last step took {took:.1f} ms"
