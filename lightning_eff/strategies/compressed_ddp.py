"""DDP with compressed gradients: PowerSGD (arXiv:1905.13727), bfloat16, 1-bit SGD, and QSGD as in CGX."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

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

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Number, OneOf
from lightning_eff._core._lightning.names import Connected, of_both
from lightning_eff._core._needs.needs import Part
from lightning_eff._core._surveys.items import InSurveys
from lightning_eff._core.search_space import Choice, SearchSpace, needs_processes
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
# The options of each hook, with their defaults.
_OPTIONS: dict[str, dict[str, Any]] = {
    "powersgd": {"rank": 4, "start_step": 10, "error_feedback": True, "min_compression_rate": 2.0},
    "bf16": {"start_step": 0},
    "onebit": {"start_step": 10, "error_feedback": True},
    "qsgd": {"start_step": 0, "error_feedback": True, "bits": 4, "bucket_size": 1024},
}


@of_both
class CompressedDDPStrategy(Connected, DDPStrategy):
    """Train with DDP and compress the gradients that ranks exchange.

    ``strategy="ddp_powersgd"``, ``"ddp_bf16"``, ``"ddp_onebit"`` and ``"ddp_qsgd"`` select a hook with its defaults:

    - "powersgd" (Vogels et al. 2019) sends each matrix as ``P Q^T`` of a small rank. It uses torch's hook.
    - "bf16" sends gradients in bfloat16, which halves the bytes. It uses torch's hook.
    - "onebit" (Seide et al. 2014; Tang et al. 2021) sends signs, with one scale per row.
    - "qsgd" (Alistarh et al. 2017; CGX, Markov et al. 2022) rounds stochastically to ``bits`` bits, with one scale per
      bucket.

    Vectors, such as biases and norms, are never compressed. Each rank adds its compression error to its next gradient
    (error feedback).

    Use it on slow links: Ethernet between nodes, or PCIe between consumer GPUs, where CGX reports up to 3 times the
    throughput. It trades computation on every rank for bytes. On NVLink or InfiniBand, "onebit" and "qsgd" take longer
    than the transfer they save, so use plain DDP or "bf16" there. "onebit" and "qsgd" run on the stream of the backward
    pass and do not overlap with it; torch's hooks do. ``lightning-eff bench`` measures it on your machine.

    The checkpoint holds the error feedback of every rank, gathered by rank 0. It grows by up to N float32 copies of the
    gradients for N ranks. A resumed run is bit for bit the uninterrupted one, wherever plain DDP is. With another number
    of ranks, the error is redistributed. A checkpoint without this state starts with no error. The checkpoint loads into
    the plain module and resumes in plain DDP.

    One process trains as plain DDP does. The strategy logs ``eff/compressed_ddp/sent_bytes`` and ``plain_bytes``, the bytes
    that this rank sends per step and those that plain DDP would send, and their ``ratio``.

    Args:
        hook: the compression of gradients.
        rank: the rank of the approximation, for "powersgd". None is 4. The paper uses 1 to 4, and 32 for language models.
        start_step: the number of optimizer steps without compression at the start. None is 10 for "powersgd" and "onebit",
            else 0. torch advises a tenth of the run for PowerSGD. 1-bit SGD needs such a start too.
        error_feedback: whether to add the compression error to the next gradient. None is True. "bf16" has none. Without
            it "onebit" and "powersgd" are biased.
        min_compression_rate: the factor by which a matrix must shrink to be compressed, for "powersgd". None is 2. Other
            matrices are sent whole.
        bits: the number of bits per element, for "qsgd". None is 4.
        bucket_size: the number of elements that share a scale, for "qsgd". None is 1024. CGX uses 1024 for CNNs and
            smaller buckets for Transformers.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, kwargs: as in DDPStrategy.

    Raises:
        ValueError: for a value out of range, an option that the hook does not use, or a ``ddp_comm_hook``. At setup, with
            a gradient scaler (``16-mixed``), because its changing scale does not fit the error feedback.

    Example:
        >>> strategy = CompressedDDPStrategy("powersgd", rank=4, start_step=1000)
        >>> trainer = L.Trainer(max_epochs=10, strategy=strategy)

    References:
        Vogels et al. 2019, "PowerSGD", arXiv:1905.13727. Seide et al. 2014, "1-Bit Stochastic Gradient Descent". Tang et
        al. 2021, "1-bit Adam", arXiv:2102.02888. Alistarh et al. 2017, "QSGD", arXiv:1610.02132. Markov et al. 2022,
        "CGX", arXiv:2111.08617.
    """

    kind: ClassVar[str] = "strategy"
    saves: ClassVar[str] = "bytes between ranks: 2x (bf16), 6x (qsgd), up to 17x (onebit, powersgd) at width 64"
    paper: ClassVar[str] = "Vogels et al. 2019; Seide et al. 2014; Alistarh et al. 2017; Markov et al. 2022 (CGX)"
    constraints: ClassVar[str] = "pays only on slow links; no fp16 scaler; checkpoints hold each rank's error feedback"
    survey = InSurveys()
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"hook": Choice(("bf16", "powersgd", "onebit", "qsgd"))}, needs_processes
    )
    strategy_name = "compressed_ddp"
    parts: ClassVar[tuple[Part, ...]] = (Part.COMPRESSED,)

    @declared
    def __init__(
        self,
        hook: HookName = "powersgd",
        *,
        rank: Annotated[int, Count()] | None = None,
        start_step: Annotated[int, Count(at_least=0)] | None = None,
        error_feedback: bool | None = None,
        min_compression_rate: Annotated[float, Number(above=0)] | None = None,
        bits: Annotated[int, OneOf(2, 4, 8)] | None = None,
        bucket_size: Annotated[int, Count()] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **kwargs: Any,
    ) -> None:
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
            _check_used(hook, name, value)
        taken = [name for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper") if kwargs.get(name)]
        if taken or kwargs.get("model_averaging_period"):
            raise ValueError(
                f"CompressedDDPStrategy({', '.join(taken) or 'model_averaging_period'}=...): DDP takes one communication"
                " hook, and this strategy has its own. Leave the argument out, or use Lightning's DDPStrategy."
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
                f"CompressedDDPStrategy: got precision {self.precision_plugin.precision!r}, whose gradient scaler rescales"
                " gradients and lets infinite ones through, which would corrupt the error feedback. Use"
                " precision='bf16-mixed', or strategy='ddp'."
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
        """Return the context of the module's own ``training_step``, inside everything that techniques put around it."""
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
                " without error feedback and with its plain steps."
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


def _check_used(hook: str, name: str, value: Any) -> None:
    """Raise ``ValueError`` if ``hook`` does not use the option ``name``."""
    if name not in _OPTIONS[hook]:
        using = ", ".join(repr(other) for other, options in _OPTIONS.items() if name in options)
        raise ValueError(
            f"CompressedDDPStrategy(hook={hook!r}, {name}={value!r}): {name} does nothing with this hook. Leave it out, or set"
            f" hook to one of {using}."
        )


CompressedDDPStrategy.register_strategies(StrategyRegistry)
