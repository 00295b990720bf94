"""DDP whose gradients travel compressed: PowerSGD (arXiv:1905.13727), bfloat16, 1-bit SGD, QSGD as CGX sends it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._lightning.names import Connected, of_both
from lightning_eff._core._needs.needs import Part
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, needs_processes
from lightning_eff._core.session import is_open
from lightning_eff.strategies import _names
from lightning_eff.strategies._communication.codecs import QuantizedCodec, SignCodec
from lightning_eff.strategies._communication.exchange import log_traffic
from lightning_eff.strategies._communication.gathering import gather_on_first
from lightning_eff.strategies._inplace import Copies

if TYPE_CHECKING:
    from lightning_eff.strategies._communication.hooks import GradientHook

HookName = Literal["powersgd", "bf16", "onebit", "qsgd"]
_KEY = "CompressedDDPStrategy"
# What each hook listens to, and its defaults.
_OPTIONS: dict[str, dict[str, Any]] = {
    "powersgd": {"rank": 4, "start_step": 10, "error_feedback": True, "min_compression_rate": 2.0},
    "bf16": {"start_step": 0},
    "onebit": {"start_step": 10, "error_feedback": True},
    "qsgd": {"start_step": 0, "error_feedback": True, "bits": 4, "bucket_size": 1024},
}


@of_both
class CompressedDDPStrategy(Connected, DDPStrategy):
    """Lightning's DDP with a communication hook that sends fewer bytes, whose state is in the checkpoints.

    ``strategy="ddp_powersgd"``, ``"ddp_bf16"``, ``"ddp_onebit"`` and ``"ddp_qsgd"`` name it with its defaults.

    - "powersgd" (Vogels et al. 2019): each matrix as ``P Q^T`` of a small rank; torch's hook.
    - "bf16": gradients in bfloat16, half the bytes; torch's hook.
    - "onebit" (Seide et al. 2014; Tang et al. 2021, arXiv:2102.02888): signs, with a scale a row.
    - "qsgd" (Alistarh et al. 2017, arXiv:1610.02132; CGX, Markov et al. 2022, arXiv:2111.08617): stochastic rounding to
      ``bits`` bits with a scale a bucket.

    Vectors, such as biases and norms, are never compressed. What compression leaves out is added to the next gradient
    (error feedback), on each rank for itself, and each rank's is in the checkpoint: resuming is bit for bit the
    undisturbed run, wherever plain DDP's is. Only the strategy knows of it, so the checkpoint loads into the plain module,
    and resumes in plain DDP. A checkpoint of N ranks is larger by up to N copies of the gradients in float32, gathered by
    rank 0. With another number of ranks, what is unsent is shared out anew; a checkpoint without this state starts
    with none.

    **What it pays for.** It trades computation on every rank for bytes. It pays where the link is slow: Ethernet between
    nodes, or PCIe between consumer GPUs, where CGX reports up to 3 times the throughput. On NVLink or InfiniBand "onebit"
    and "qsgd" take longer than the transfer they save; use plain DDP or "bf16" there. "onebit" and "qsgd" run on the
    stream of the backward pass and do not overlap with it; torch's hooks do. Which it is on your machine,
    ``lightning-eff bench`` tells.

    One process trains as plain DDP does. Logged are ``eff/compressed_ddp/sent_bytes`` and ``plain_bytes``, which this rank
    sends in a step and plain DDP would, and their ``ratio``.

    Args:
        hook: how gradients travel.
        rank: "powersgd": of the approximation, >= 1; 4 if None. The paper uses 1 to 4, and 32 for language models.
        start_step: so many optimizer steps are plain ones first, >= 0; None is 10 for "powersgd" and "onebit", else 0.
            torch advises a tenth of the run for PowerSGD; 1-bit SGD needs such a start too.
        error_feedback: True if None; "bf16" has none. Without it "onebit" and "powersgd" are biased.
        min_compression_rate: "powersgd": matrices that would not shrink by this factor are sent whole; 2 if None.
        bits: "qsgd": 2, 4 or 8 an element; 4 if None.
        bucket_size: "qsgd": how many elements share a scale, >= 1; 1024 if None. CGX takes 1024 for CNNs and smaller
            buckets for Transformers.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, kwargs: as DDPStrategy.

    Raises:
        ValueError: if an argument is out of its range or the hook does not listen to it, or a ``ddp_comm_hook`` is
            given too; at setup, with a gradient scaler (``16-mixed``), whose factor changes under the error feedback.
    """

    kind: ClassVar[str] = "strategy"
    saves: ClassVar[str] = "bytes between ranks: 2x (bf16), 6x (qsgd), up to 17x (onebit, powersgd) at width 64"
    paper: ClassVar[str] = "Vogels et al. 2019; Seide et al. 2014; Alistarh et al. 2017; Markov et al. 2022 (CGX)"
    constraints: ClassVar[str] = "pays on slow links only; no fp16 scaler; checkpoints hold each rank's error feedback"
    survey: ClassVar[Survey | None] = Survey("gradient compression", shen="7.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"hook": Choice(("bf16", "powersgd", "onebit", "qsgd"))}, needs_processes
    )
    strategy_name = "compressed_ddp"
    parts: ClassVar[tuple[Part, ...]] = (Part.COMPRESSED,)

    def __init__(
        self,
        hook: HookName = "powersgd",
        *,
        rank: int | None = None,
        start_step: int | None = None,
        error_feedback: bool | None = None,
        min_compression_rate: float | None = None,
        bits: int | None = None,
        bucket_size: int | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **kwargs: Any,
    ) -> None:
        if hook not in _OPTIONS:
            raise ValueError(f"CompressedDDPStrategy({hook=}): expected one of {', '.join(get_args(HookName))}.")
        given = {
            "rank": rank,
            "start_step": start_step,
            "error_feedback": error_feedback,
            "min_compression_rate": min_compression_rate,
            "bits": bits,
            "bucket_size": bucket_size,
        }
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            _check_option(hook, name, value)
        taken = [name for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper") if kwargs.get(name)]
        if taken or kwargs.get("model_averaging_period"):
            raise ValueError(
                f"CompressedDDPStrategy({', '.join(taken) or 'model_averaging_period'}=...): DDP takes one communication"
                " hook, and this strategy brings its own. Leave it out, or use Lightning's DDPStrategy with yours."
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            **kwargs,
        )
        self.hook = hook
        self.options: dict[str, Any] = {**_OPTIONS[hook], **given}
        self._state: GradientHook | None = None
        self._loaded: list[dict[str, Any]] | None = None
        self._copies: Copies | None = None

    # -- the run

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING and getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"CompressedDDPStrategy: got precision {self.precision_plugin.precision!r}, whose gradient scaler changes"
                " the gradients' factor and lets infinite ones through, which would stay in the error feedback; expected"
                " a precision without one. Use precision='bf16-mixed', or strategy='ddp'."
            )
        self._state = None
        self._copies = Copies(None, who=_KEY) if self.world_size > 1 else None
        super().setup(trainer)

    @override
    def _register_ddp_hooks(self) -> None:
        from lightning_eff.strategies._communication.hooks import run_hook

        assert isinstance(self.model, DistributedDataParallel) and self.lightning_module is not None
        if self.world_size == 1:
            return
        names: dict[torch.Tensor, str] = {p: name for name, p in self.lightning_module.named_parameters()}
        if self._state is None:
            self._state = self._build(names)
            if self._loaded is not None:
                self._state.load_state_dict(self._loaded)
                self._loaded = None
        else:
            self._state.rewrapped(names)
        self.model.register_comm_hook(self._state, run_hook)

    def _build(self, names: dict[torch.Tensor, str]) -> "GradientHook":
        from lightning_eff.strategies._communication.hooks import BF16Hook, CodecHook, PowerSGDHook

        common: dict[str, Any] = {
            "start_step": self.options["start_step"],
            "seed": self.broadcast(torch.initial_seed() % 2**63),
        }
        o = self.options
        if self.hook == "bf16":
            return BF16Hook(names, **common)
        common["error_feedback"] = o["error_feedback"]
        if self.hook == "powersgd":
            return PowerSGDHook(names, rank=o["rank"], min_compression_rate=o["min_compression_rate"], **common)
        codec = SignCodec() if self.hook == "onebit" else QuantizedCodec(o["bits"], o["bucket_size"])
        return CodecHook(names, codec=codec, **common)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if self._copies is None or self._copies.done:
            return super().training_step(*args, **kwargs)
        outside = is_open(self.lightning_module.trainer)  # with techniques, a session calls around_own_step
        own = nullcontext() if outside else self.around_own_step()
        with self._copies.looking(dict(self.lightning_module.named_parameters())), own:
            return super().training_step(*args, **kwargs)

    def around_own_step(self) -> AbstractContextManager[None]:
        """What stands around the module's own ``training_step``, inside all that techniques put around it."""
        return nullcontext() if self._copies is None else self._copies.own_step()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._state is not None:
            log_traffic(self.lightning_module, "compressed_ddp", self._state.last)
        return output

    # -- checkpoints

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._state is not None:
            ranks = gather_on_first(self._state.state_dict(), self.root_device)
            checkpoint[_KEY] = {"hook": self.hook, "ranks": ranks}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        saved = checkpoint.pop(_KEY, None)
        module = self.lightning_module
        if saved is None or module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        if saved["hook"] != self.hook:
            rank_zero_info(
                f"CompressedDDPStrategy: the checkpoint was saved with hook={saved['hook']!r}, so {self.hook!r} starts"
                " anew: with its plain steps, and without error feedback from the past."
            )
        else:
            self._loaded = saved["ranks"]
        return checkpoint

    @override
    def teardown(self) -> None:
        super().teardown()
        self._loaded = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        _names.register(strategy_registry, cls, "CompressedDDPStrategy")


def _check_option(hook: str, name: str, value: Any) -> None:
    """Raise ValueError if ``hook`` does not listen to the option, or its value is out of range."""
    if name not in _OPTIONS[hook]:
        listening = ", ".join(repr(other) for other, options in _OPTIONS.items() if name in options)
        raise ValueError(
            f"CompressedDDPStrategy(hook={hook!r}, {name}={value!r}): {name} does nothing with this hook; expected it to be"
            f" left out, or hook one of {listening}."
        )
    integer = isinstance(value, int) and not isinstance(value, bool)
    ranges: dict[str, tuple[bool, str]] = {
        "rank": (integer and value >= 1, "an integer >= 1"),
        "start_step": (integer and value >= 0, "a number of optimizer steps >= 0"),
        "error_feedback": (isinstance(value, bool), "True or False"),
        "min_compression_rate": (isinstance(value, int | float) and value > 0, "a factor > 0"),
        "bits": (value in (2, 4, 8), "2, 4 or 8"),
        "bucket_size": (integer and value >= 1, "a number of elements >= 1"),
    }
    fine, expected = ranges[name]
    if not fine:
        raise ValueError(f"CompressedDDPStrategy({name}={value!r}): expected {expected}.")


CompressedDDPStrategy.register_strategies(StrategyRegistry)
