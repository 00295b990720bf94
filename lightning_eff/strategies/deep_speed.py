"""DeepSpeed for unchanged modules: ZeRO with offload to CPU or NVMe, and 1-bit Adam, 0/1 Adam and 1-bit LAMB."""

import math
import os
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.fabric.strategies.deepspeed import _DEEPSPEED_AVAILABLE
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, OneOf, Text
from lightning_eff._core._checkpoints.background import refuse_deepspeed
from lightning_eff._core._lightning.extras import missing
from lightning_eff._core._lightning.names import Connected, of_both
from lightning_eff._core._surveys.items import InSurveys
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, needs_processes
from lightning_eff.strategies import _names
from lightning_eff.strategies._communication.exchange import log_traffic
from lightning_eff.strategies._communication.gathering import gather_on_first
from lightning_eff.strategies._communication.onebit_adam import OneBitAdam
from lightning_eff.strategies._communication.onebit_lamb import OneBitLamb
from lightning_eff.strategies._communication.onebit_optimizer import OneBitOptimizer, check_source
from lightning_eff.strategies._communication.zero_one_adam import ZeroOneAdam

OptimizerName = Literal["onebit_adam", "zero_one_adam", "onebit_lamb"]
_KEY = "DeepSpeedEffStrategy"
_START = 0.2  # of the run's steps, in the 15 to 25 % of the 1-bit Adam paper
_CLASSES: dict[str, type[OneBitOptimizer]] = {
    "onebit_adam": OneBitAdam,
    "zero_one_adam": ZeroOneAdam,
    "onebit_lamb": OneBitLamb,
}


def _pointless(profile: RunProfile) -> str | None:
    if profile.accelerator == "cpu":
        return "it needs GPUs"
    return needs_processes(profile)


@of_both
class DeepSpeedEffStrategy(Connected, DeepSpeedStrategy):
    """Train an unchanged module with DeepSpeed: 1-bit optimizers, ZeRO, and offload to CPU memory or NVMe.

    **1-bit optimizers.** ``strategy="deepspeed_onebit_adam"``, ``"deepspeed_zero_one_adam"`` and
    ``"deepspeed_onebit_lamb"`` replace the Adam or AdamW that ``configure_optimizers`` returns. They keep its parameter
    groups, lr, betas, eps, weight decay and learning rate schedulers. DeepSpeed removed its own 1-bit optimizers (pull
    request 8490; 0.19.8 has none), so these are implemented here after the papers, within DeepSpeed's engine. The engine
    averages gradients until the variance is frozen. After that, the optimizer averages momenta through their signs.

    Use them on slow links. The paper of 1-bit Adam reports up to 3.3 times the throughput in the pre-training of
    BERT-Large. On NVLink, compression costs more than it saves, so use ZeRO or DDP there. The checkpoint holds each rank's
    error feedback, gathered by rank 0, so a resumed run equals the uninterrupted one. It grows by up to N float32 copies of
    the weights for N ranks. With 0/1 Adam, ranks drift apart for up to ``max_local_interval`` steps. Validation,
    checkpoints and the end of the run see the mean of their weights. While gradients stay local, clipping acts on each
    rank's own gradient.

    **ZeRO.** ``"deepspeed_zero_1"``, ``"deepspeed_zero_2"`` and ``"deepspeed_zero_3"`` are Lightning's stages.
    ``"deepspeed_zero_2_offload"``, ``"deepspeed_zero_3_offload"`` and ``"deepspeed_infinity"`` accept any torch optimizer,
    which DeepSpeed refuses by default with offload. torch's Adam on the CPU is slower than
    ``deepspeed.ops.adam.DeepSpeedCPUAdam``, which your module can return instead. Build large models in
    ``configure_model`` with stage 3, so that no rank ever holds the whole model.

    With a 1-bit optimizer, the strategy logs ``eff/deepspeed/sent_bytes`` and ``plain_bytes`` per step, counted as in
    CompressedDDPStrategy, and their ``ratio``.

    Args:
        optimizer: the 1-bit optimizer. None keeps the module's own.
        stage: the stage of ZeRO. None is 0 with a 1-bit optimizer, and 2 otherwise.
        offload: the place of offloaded state. "cpu" keeps optimizer state, and with stage 3 parameters, in CPU memory.
            "nvme" keeps them on disk and needs stage 3.
        nvme_path: a writable folder on the disk for "nvme".
        freeze_step: the number of optimizer steps before a 1-bit optimizer freezes the variance. None is 20 % of the run.
        variance_updates: the number of variance updates before their interval doubles, for "zero_one_adam". None is 16.
        local_updates: the number of weight exchanges before their interval doubles, for "zero_one_adam". None is 32678.
        max_local_interval: the maximum number of local steps between exchanges, for "zero_one_adam". None is 16.
        kwargs: as in Lightning's DeepSpeedStrategy, except ``zero_optimization`` and ``offload_*``.

    Raises:
        ModuleNotFoundError: if DeepSpeed is not installed.
        ValueError: for a value out of range, or arguments that contradict each other. At setup, if the module's optimizer
            is not an Adam, the precision is fp16, the run has no end to take 20 % of, or the checkpoint was saved with
            another optimizer.

    Example:
        >>> strategy = DeepSpeedEffStrategy("onebit_adam", freeze_step=2000)
        >>> trainer = L.Trainer(max_epochs=10, strategy=strategy, accelerator="cuda", devices=8)  # doctest: +SKIP

    References:
        Tang et al. 2021, "1-bit Adam", arXiv:2102.02888. Lu et al. 2022, "0/1 Adam", arXiv:2202.06009. Li et al. 2021,
        "1-bit LAMB", arXiv:2104.06069. Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054. Rajbhandari et al. 2021,
        "ZeRO-Infinity", arXiv:2104.07857.
    """

    kind: ClassVar[str] = "strategy"
    saves: ClassVar[str] = "bytes between ranks (1-bit optimizers); memory (ZeRO, offload)"
    paper: ClassVar[str] = (
        "Tang et al. 2021; Lu et al. 2022; Li et al. 2021; Rajbhandari et al. 2020, 2021 (ZeRO, Infinity)"
    )
    constraints: ClassVar[str] = "needs DeepSpeed and GPUs; 1-bit optimizers: an Adam or AdamW, no ZeRO, no fp16"
    survey = InSurveys()
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"stage": Choice((1, 2, 3))},
        _pointless,
    )
    strategy_name = "deepspeed_eff"

    @declared
    def __init__(
        self,
        optimizer: OptimizerName | None = None,
        *,
        stage: Annotated[int, OneOf(0, 1, 2, 3)] | None = None,
        offload: Literal["cpu", "nvme"] | None = None,
        nvme_path: Annotated[str, Text("the path of a folder")] = "/local_nvme",
        freeze_step: Annotated[int, Count()] | None = None,
        variance_updates: Annotated[int, Count()] | None = None,
        local_updates: Annotated[int, Count()] | None = None,
        max_local_interval: Annotated[int, Count()] | None = None,
        **kwargs: Any,
    ) -> None:
        who = type(self).__name__
        self.onebit = optimizer
        self.options = _checked(
            who,
            optimizer,
            freeze_step=freeze_step,
            variance_updates=variance_updates,
            local_updates=local_updates,
            max_local_interval=max_local_interval,
        )
        stage = _checked_stage(who, optimizer, stage, offload, nvme_path, kwargs)
        if not _DEEPSPEED_AVAILABLE:
            raise ModuleNotFoundError(missing(who, "deepspeed", "deepspeed"))
        super().__init__(
            zero_optimization=stage > 0,
            stage=stage,
            offload_optimizer=offload is not None,
            offload_parameters=offload is not None and stage == 3,
            offload_optimizer_device=offload or "cpu",
            offload_params_device=offload or "cpu",
            remote_device=offload if stage == 3 else None,
            nvme_path=nvme_path,
            **kwargs,
        )
        assert isinstance(self.config, dict)
        if offload is not None:
            self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        self._optimizer: OneBitOptimizer | None = None

    # -- the run

    @override
    def setup(self, trainer: Trainer) -> None:
        if self.onebit is not None and "16" in self.precision_plugin.precision.replace("bf16", ""):
            raise ValueError(
                f"{type(self).__name__}(optimizer={self.onebit!r}): got precision {self.precision_plugin.precision!r}, whose"
                " changing loss scale does not fit the error feedback. Use precision='32-true' or 'bf16-mixed'."
            )
        refuse_deepspeed(self)
        self._optimizer = None
        super().setup(trainer)

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        source, scheduler = super()._init_optimizers()
        if self.onebit is None:
            return source, scheduler
        check_source(source, who=f"{type(self).__name__}(optimizer={self.onebit!r})")
        options = {"freeze_step": self._freeze_step(), **self.options}
        self._optimizer = _CLASSES[self.onebit](source, **options)
        return self._optimizer, scheduler

    def _freeze_step(self) -> int:
        """Return ``freeze_step``, by default a fifth of the run's optimizer steps."""
        if "freeze_step" in self.options:
            return self.options["freeze_step"]
        assert self.lightning_module is not None
        steps = self.lightning_module.trainer.estimated_stepping_batches
        if not 0 < steps < math.inf:
            raise ValueError(
                f"{type(self).__name__}(optimizer={self.onebit!r}): the Trainer has no end, so the default of freeze_step (20 %"
                " of the run) is unknown. Set max_steps or max_epochs, or give freeze_step."
            )
        return max(1, round(_START * steps))

    @override
    def _initialize_deepspeed_train(self, model: Module) -> None:
        super()._initialize_deepspeed_train(model)
        if self._optimizer is not None:
            engine = self.deepspeed_engine

            def reduce_gradients(wanted: bool) -> None:
                engine.enable_backward_allreduce = wanted

            self._optimizer.begin(reduce_gradients)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._optimizer is not None:
            log_traffic(self.lightning_module, "deepspeed", self._optimizer.traffic)
        return output

    # -- weights that differ between ranks, between the exchanges of 0/1 Adam

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._show(mean=True)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._show(mean=False)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._show(mean=True)

    @torch.no_grad()
    def _show(self, *, mean: bool) -> None:
        if self._optimizer is None:
            return
        if mean:
            self._optimizer.show_mean()
        else:
            self._optimizer.show_own()
        wrapper: Any = self.deepspeed_engine.optimizer  # in bf16 it keeps float32 copies, which the optimizer updates
        for low, high in zip(getattr(wrapper, "fp16_groups", []), getattr(wrapper, "fp32_groups", []), strict=True):
            for p, master in zip(low, high, strict=True):
                p.copy_(master)

    # -- checkpoints

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._optimizer is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        ranks = gather_on_first(self._optimizer.rank_state(), self.root_device)
        checkpoint[_KEY] = {"optimizer": self.onebit, "ranks": ranks}
        shown = self._optimizer._own is not None
        self._show(mean=True)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if not shown:
            self._show(mean=False)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        saved = checkpoint.pop(_KEY, None)
        module = self.lightning_module
        if self._optimizer is None or module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        if saved is None or saved["optimizer"] != self.onebit:
            raise ValueError(
                f"{type(self).__name__}(optimizer={self.onebit!r}): the checkpoint {checkpoint_path} was saved with optimizer="
                f"{saved and saved['optimizer']!r}. Resume with that optimizer, or load only the weights."
            )
        self._optimizer.load_rank_state(saved["ranks"])
        self._show(mean=False)
        return checkpoint

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        _names.register(strategy_registry, cls, "DeepSpeedEffStrategy")


def _checked(who: str, optimizer: str | None, **options: int | None) -> dict[str, int]:
    """Return the options that were given, if ``optimizer`` uses them."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if optimizer is None or (name != "freeze_step" and optimizer != "zero_one_adam"):
            raise ValueError(
                f"{who}({optimizer=}, {name}={value!r}): {name} does nothing with this optimizer. Leave it out, or set"
                f" optimizer={'onebit_adam' if name == 'freeze_step' else 'zero_one_adam'!r}."
            )
    return given


def _checked_stage(
    who: str, optimizer: str | None, stage: int | None, offload: str | None, nvme_path: str, kwargs: dict[str, Any]
) -> int:
    """Return the stage of ZeRO, if it fits the other arguments."""
    ours = [name for name in kwargs if name == "zero_optimization" or name.startswith("offload_")]
    if ours:
        raise ValueError(f"{who}({', '.join(ours)}=...): this strategy sets it. Use stage= and offload= instead.")
    if kwargs.get("config") is not None and (optimizer or stage is not None or offload):
        raise ValueError(
            f"{who}(config=...): a config replaces optimizer=, stage= and offload=. Give either the config or these."
        )
    if optimizer is not None and (stage or offload):
        raise ValueError(
            f"{who}({optimizer=}, {stage=}, {offload=}): a 1-bit optimizer needs the whole momentum on each rank, which ZeRO"
            " divides. Leave out stage and offload, or optimizer."
        )
    stage = (2 if optimizer is None else 0) if stage is None else stage
    least = {"cpu": 1, "nvme": 3}.get(offload or "", 0)
    if stage < least:
        raise ValueError(
            f"{who}({stage=}, {offload=}): offload to {offload} needs stage {least} or higher. Set stage={max(least, 2)}."
        )
    if offload == "nvme" and not (os.path.isdir(nvme_path) and os.access(nvme_path, os.W_OK)):
        raise ValueError(
            f"{who}({nvme_path=}): this is not a writable folder, and parameters and optimizer state are stored there. Create"
            f" it, or give another one: strategy={who}(stage=3, offload='nvme', nvme_path=...)."
        )
    return stage


DeepSpeedEffStrategy.register_strategies(StrategyRegistry)
