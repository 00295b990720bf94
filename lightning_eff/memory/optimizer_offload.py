"""Optimizer offloading: states and update live on the host (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840)."""

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
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey, needs_memory_bound
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.memory._hosting.update import HostUpdate, check_optimizer


def _pointless(profile: RunProfile) -> str | None:
    if profile.accelerator == "cpu":
        return "the device is the host: there is nowhere to offload to"
    if not profile.optimizer_states:
        return "the optimizer keeps no states"
    return needs_memory_bound(profile)


def _step_of(update: HostUpdate, plain: Any) -> Callable[..., Any]:
    """The step on the host as a function of the optimizer, since a scheduler that is made later looks into a method."""

    @functools.wraps(getattr(plain, "__func__", plain))
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return update.step(*args, **kwargs)

    return step


class OptimizerOffload(Technique):
    """Keep optimizer states in host memory and make the update there: the split of ZeRO-Offload.

    Forward and backward pass, accumulation, clipping and a gradient scaler's unscaling are on the device as before. Then the
    gradients go to the host, the user's own optimizer makes its step there on twins of the parameters, and the updated
    parameters come back. The device keeps weights and gradients and none of the states: of AdamW's 16 bytes a weight in
    float32, 8 are left. Copies are pinned on CUDA, and take 4 bytes a weight each way; the step itself runs on the CPU, with
    torch's fused kernels where the class has them, so this pays where steps are long: large batches, or many accumulated.

    The optimizer stays the same object, so schedulers and hooks work on, and its ``state_dict`` has the plain form: a run can
    be resumed with or without the technique. Parameters keep their precision; bfloat16 ones get no float32 copy. Under DDP
    each rank keeps a host copy of its own.

    On the CPU nothing is gained: the same machinery runs within host memory, bit for bit as plain training, and a warning
    says so.

    Logged: ``bytes_to_host`` and ``bytes_to_device`` of the last step, ``state_bytes``, which the device does not hold, and
    ``seconds`` that the last step took, copies included.

    Args:
        pin_memory: use pinned host memory for gradients and twins on CUDA; torch rounds each up to a power of two bytes.

    Raises:
        ValueError: at setup, if an optimizer is not one of torch.optim's own that need gradients alone, is capturable or
            differentiable, holds tensors on the device as settings, or unscales gradients itself.

    Sources:
        Ren et al. 2021, arXiv:2101.06840.
    """

    saves: ClassVar[str] = (
        "device memory of optimizer states, 8 of 16 bytes a weight with AdamW; costs time in each step"
    )
    paper: ClassVar[str] = "Ren et al. 2021, arXiv:2101.06840"
    refuses: ClassVar[Reasons] = {
        **dict.fromkeys((Part.FLAT, Part.ENGINE), "the strategy has offloading of its own"),
        Part.PIPELINE: "the technique loads the optimizer state of all weights, of which each process has some",
    }
    constraints: ClassVar[str] = "torch.optim's own optimizers but LBFGS; gains on an accelerator alone"
    survey: ClassVar[Survey | None] = Survey("offloading of optimizer states", zhuang="3", shen="7.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(pointless=_pointless)
    control: ClassVar[Control] = Control("the baseline for as many seconds: each step is the plain optimizer's")
    conflicts: ClassVar[Mapping[str, str]] = {
        "StochasticRoundingBF16": "it makes each step of the optimizer in parts of its own, on the device"
    }
    needs_automatic_optimization: ClassVar[bool] = False

    def __init__(self, *, pin_memory: bool = True) -> None:
        self.pin_memory = pin_memory
        self._reset()

    def _reset(self) -> None:
        self._updates: list[HostUpdate] = []
        self._last: dict[str, float] = {}

    @override
    def attach(self, session: Session) -> None:
        self._reset()

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
                "OptimizerOffload: parameters are in host memory already: nothing is gained on a CPU, where they are"
                " copied all the same.",
                category=PossibleUserWarning,
            )
        strategy = session.trainer.strategy

        def load_optimizer_state_dict(checkpoint: Any) -> None:
            """Lightning's own would move the states to the device afterwards."""
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
            return "no optimizer stepped"
        held, took = found["state_bytes"] / 2**20, found["seconds"] * 1000
        return f"{held:,.2f} MiB of optimizer states on the host; the last step took {took:.1f} ms"
