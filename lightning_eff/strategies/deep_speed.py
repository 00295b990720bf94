"""DeepSpeed for unchanged modules: ZeRO with offload to CPU or NVMe, and 1-bit Adam, 0/1 Adam and 1-bit LAMB."""

import math
import os
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

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

from lightning_eff._core._lightning.extras import missing
from lightning_eff._core._lightning.names import Connected, of_both
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, needs_processes
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
        return "a CPU is no device for DeepSpeed"
    return needs_processes(profile)


@of_both
class DeepSpeedEffStrategy(Connected, DeepSpeedStrategy):
    """Lightning's DeepSpeedStrategy, set up so that a module with an ordinary ``configure_optimizers`` trains as it is.

    **1-bit optimizers.** ``strategy="deepspeed_onebit_adam"``, ``"deepspeed_zero_one_adam"`` or ``"deepspeed_onebit_lamb"``
    take the Adam or AdamW that ``configure_optimizers`` returns: its parameter groups, lr, betas, eps and weight decay, and
    its learning rate schedulers go on working. DeepSpeed had such optimizers and removed them (its pull request 8490;
    0.19.8 has none), so these are this package's, after the papers, within DeepSpeed's engine: it averages gradients as
    long as the optimizer asks for it, and the optimizer averages momenta through signs after that. Each rank's error
    feedback is in the checkpoint, gathered by rank 0, so that a resumed run is the undisturbed one; the checkpoint grows by
    up to N copies of the weights in float32. 0/1 Adam's local steps let ranks drift apart for up to
    ``max_local_interval`` steps; validation, checkpoints and the end of the run have the mean of the ranks' weights.
    While gradients stay local, clipping acts on each rank's own.

    They pay on slow links: 1-bit Adam's paper reports up to 3.3 times the throughput in BERT-Large's pre-training. On
    NVLink, compressing costs more than it saves: use ZeRO or DDP there.

    **ZeRO.** ``"deepspeed_zero_1"``, ``"_2"`` and ``"_3"`` are Lightning's stages. ``"deepspeed_zero_2_offload"``,
    ``"deepspeed_zero_3_offload"`` and ``"deepspeed_infinity"`` accept any torch optimizer, which DeepSpeed refuses with
    offload unless told otherwise; torch's Adam on the CPU is slower than ``deepspeed.ops.adam.DeepSpeedCPUAdam``, which a
    module may return instead. Build large models in ``configure_model`` with stage 3, so that no rank ever holds all of it.

    Logged with a 1-bit optimizer are ``eff/deepspeed/sent_bytes`` and ``plain_bytes`` of a step, counted as for
    CompressedDDPStrategy, and their ``ratio``.

    Args:
        optimizer: "onebit_adam", "zero_one_adam", "onebit_lamb", or None for the module's own.
        stage: of ZeRO, 0 to 3; None is 0 with a 1-bit optimizer, and 2 otherwise.
        offload: "cpu": optimizer state, and with stage 3 parameters, in CPU memory; "nvme": on disk, stage 3 only.
        nvme_path: a writable folder on the disk for "nvme".
        freeze_step: 1-bit optimizers: optimizer steps before the variance stays, >= 1; None is 20 % of the run.
        variance_updates: "zero_one_adam": renewals of the variance before their interval doubles, >= 1; 16 if None.
        local_updates: "zero_one_adam": meetings of the ranks before their interval doubles, >= 1; 32678 if None.
        max_local_interval: "zero_one_adam": the most local steps between meetings, >= 1; 16 if None.
        kwargs: as Lightning's DeepSpeedStrategy, but for ``zero_optimization`` and ``offload_*``.

    Raises:
        ModuleNotFoundError: if DeepSpeed is not installed.
        ValueError: if an argument is out of range or contradicts another; at setup, if the module's optimizer is no
            Adam, the precision is fp16, the run has no end to take 20 % of, or the checkpoint is of another optimizer.
    """

    kind: ClassVar[str] = "strategy"
    saves: ClassVar[str] = "bytes between ranks (1-bit optimizers); memory (ZeRO, offload)"
    paper: ClassVar[str] = (
        "Tang et al. 2021; Lu et al. 2022; Li et al. 2021; Rajbhandari et al. 2020, 2021 (ZeRO, Infinity)"
    )
    constraints: ClassVar[str] = "needs DeepSpeed and GPUs; 1-bit optimizers: an Adam or AdamW, no ZeRO, no fp16"
    survey: ClassVar[Survey | None] = Survey("ZeRO, offloading and 1-bit optimizers", zhuang="3", shen="7.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"stage": Choice((1, 2, 3))},
        _pointless,
    )
    strategy_name = "deepspeed_eff"

    def __init__(
        self,
        optimizer: OptimizerName | None = None,
        *,
        stage: int | None = None,
        offload: Literal["cpu", "nvme"] | None = None,
        nvme_path: str = "/local_nvme",
        freeze_step: int | None = None,
        variance_updates: int | None = None,
        local_updates: int | None = None,
        max_local_interval: int | None = None,
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
                " loss scale changes under the error feedback; expected '32-true' or 'bf16-mixed'."
            )
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
        """The default: a fifth of the run's optimizer steps."""
        if "freeze_step" in self.options:
            return self.options["freeze_step"]
        assert self.lightning_module is not None
        steps = self.lightning_module.trainer.estimated_stepping_batches
        if not 0 < steps < math.inf:
            raise ValueError(
                f"{type(self).__name__}(optimizer={self.onebit!r}): the Trainer has no end in steps (max_steps, max_epochs)"
                " of which freeze_step could be 20 %. Set one of them, or freeze_step."
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

    # -- weights that ranks hold of their own, between the meetings of 0/1 Adam

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
        wrapper: Any = self.deepspeed_engine.optimizer  # in bf16 it keeps float32 copies, which are what steps
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
                f"{type(self).__name__}(optimizer={self.onebit!r}): the checkpoint {checkpoint_path} is of optimizer="
                f"{saved and saved['optimizer']!r}; expected the same. Resume with that, or load only the weights."
            )
        self._optimizer.load_rank_state(saved["ranks"])
        self._show(mean=False)
        return checkpoint

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        _names.register(strategy_registry, cls, "DeepSpeedEffStrategy")


def _checked(who: str, optimizer: str | None, **options: int | None) -> dict[str, int]:
    """The options that were given, if ``optimizer`` is known and listens to them."""
    if optimizer is not None and optimizer not in _CLASSES:
        raise ValueError(f"{who}({optimizer=}): expected one of {', '.join(get_args(OptimizerName))}, or None.")
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{who}({name}={value!r}): expected a whole number >= 1.")
        if optimizer is None or (name != "freeze_step" and optimizer != "zero_one_adam"):
            raise ValueError(
                f"{who}({optimizer=}, {name}={value!r}): {name} does nothing here; expected it to be left out, or"
                f" optimizer={'one of the three' if name == 'freeze_step' else 'zero_one_adam'!r}."
            )
    return given


def _checked_stage(
    who: str, optimizer: str | None, stage: int | None, offload: str | None, nvme_path: str, kwargs: dict[str, Any]
) -> int:
    """The stage of ZeRO, if it goes with the rest."""
    ours = [name for name in kwargs if name == "zero_optimization" or name.startswith("offload_")]
    if ours:
        raise ValueError(f"{who}({', '.join(ours)}=...): this strategy sets it; use stage= and offload= instead.")
    if kwargs.get("config") is not None and (optimizer or stage is not None or offload):
        raise ValueError(
            f"{who}(config=...): a config replaces optimizer=, stage= and offload=, which were given too. Give either."
        )
    if stage not in (None, 0, 1, 2, 3) or isinstance(stage, bool):
        raise ValueError(f"{who}({stage=}): expected 0, 1, 2 or 3.")
    if offload not in (None, "cpu", "nvme"):
        raise ValueError(f"{who}({offload=}): expected 'cpu', 'nvme' or None.")
    if optimizer is not None and (stage or offload):
        raise ValueError(
            f"{who}({optimizer=}, {stage=}, {offload=}): a 1-bit optimizer needs each rank's whole momentum, which ZeRO"
            " shares out; expected stage=0 without offload. Leave them out, or optimizer=None."
        )
    stage = (2 if optimizer is None else 0) if stage is None else stage
    least = {"cpu": 1, "nvme": 3}.get(offload or "", 0)
    if stage < least:
        raise ValueError(f"{who}({stage=}, {offload=}): expected a stage of at least {least} to offload to {offload}.")
    if offload == "nvme" and not (os.path.isdir(nvme_path) and os.access(nvme_path, os.W_OK)):
        raise ValueError(
            f"{who}({nvme_path=}): expected a folder that can be written to, on the disk that parameters and optimizer state"
            f" go to. Make it, or give another: strategy={who}(stage=3, offload='nvme', nvme_path=...)."
        )
    return stage


DeepSpeedEffStrategy.register_strategies(StrategyRegistry)
