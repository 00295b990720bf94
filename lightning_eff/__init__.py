"""Efficient-training techniques for PyTorch Lightning, stacked onto an unchanged LightningModule."""

import typing as _typing

from lightning_eff import _source_tree as _source_tree  # before all that imports lightning_eff.kernels
from lightning_eff.data.importance_sampling import ImportanceSampling
from lightning_eff.data.selective_backprop import SelectiveBackprop
from lightning_eff.data.sequence_length_warmup import SequenceLengthWarmup
from lightning_eff.memory.act_precision import ACTPrecision
from lightning_eff.memory.activation_compression import ActivationCompression
from lightning_eff.memory.activation_offload import ActivationOffload
from lightning_eff.memory.optimizer_offload import OptimizerOffload
from lightning_eff.memory.rematerialization import Rematerialization
from lightning_eff.model.progressive_layer_dropping import ProgressiveLayerDropping
from lightning_eff.model.progressive_stacking import ProgressiveStacking
from lightning_eff.optim.latest_weight_averaging import LatestWeightAveraging
from lightning_eff.optim.sharpness_aware_minimization import SharpnessAwareMinimization
from lightning_eff.precision.fp8 import FP8Precision
from lightning_eff.precision.int8 import INT8Precision
from lightning_eff.precision.s2fp8 import S2FP8Precision
from lightning_eff.precision.stochastic_rounding_bf16 import StochasticRoundingBF16
from lightning_eff.precision.wang_2018_fp8 import Wang2018FP8Precision
from lightning_eff.strategies.compressed_ddp import CompressedDDPStrategy
from lightning_eff.strategies.deep_speed import DeepSpeedEffStrategy
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
from lightning_eff.strategies.local_sgd import LocalSGD

if _typing.TYPE_CHECKING:
    from lightning_eff.bench import Benchmark, EfficiencyMonitor

__all__ = [
    "ACTPrecision",
    "ActivationCompression",
    "ActivationOffload",
    "Benchmark",
    "CompressedDDPStrategy",
    "DeepSpeedEffStrategy",
    "EfficiencyMonitor",
    "FP8Precision",
    "HybridParallelStrategy",
    "INT8Precision",
    "ImportanceSampling",
    "LatestWeightAveraging",
    "LocalSGD",
    "OptimizerOffload",
    "ProgressiveLayerDropping",
    "ProgressiveStacking",
    "Rematerialization",
    "S2FP8Precision",
    "SelectiveBackprop",
    "SequenceLengthWarmup",
    "SharpnessAwareMinimization",
    "StochasticRoundingBF16",
    "Wang2018FP8Precision",
]


def __getattr__(name: str) -> _typing.Any:
    """The bench is imported when it is asked for: a training run needs none of it."""
    if name in ("Benchmark", "EfficiencyMonitor"):
        from lightning_eff import bench

        return getattr(bench, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
