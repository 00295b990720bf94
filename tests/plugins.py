"""One case for each exported precision plugin: how the contract's tests set it up, and what it must refuse."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_eff import (
    ACTPrecision,
    FP8Precision,
    INT8Precision,
    S2FP8Precision,
    StochasticRoundingBF16,
    Wang2018FP8Precision,
)
from lightning_eff._core.wrapping import WrappingPrecision


@dataclass(frozen=True)
class PluginCase:
    """How one plugin is tried.

    Attributes:
        build: makes it around a precision, so that it acts within a run of 12 steps of 4 samples.
        precisions: around which it is tried.
        refuses: techniques that it cannot train with.
        lossy: whether what it computes depends on which tensors autograd saves.
        restores_dtypes: whether the module has its own dtypes again after the run, where Lightning's precision leaves others.
    """

    build: Callable[[Any], WrappingPrecision]
    precisions: tuple[str, ...] = ("32-true", "bf16-mixed")
    refuses: tuple[str, ...] = ()
    lossy: bool = False
    restores_dtypes: bool = False


PLUGINS: dict[str, PluginCase] = {
    "ACTPrecision": PluginCase(
        build=lambda precision: ACTPrecision(bits=2, inner=precision),
        precisions=("32-true", "bf16-mixed", "bf16-true"),
        refuses=("ActivationCompression", "ActivationOffload"),
        lossy=True,
    ),
    "FP8Precision": PluginCase(
        build=lambda precision: FP8Precision("rowwise", base=precision, backend="emulated"),
        precisions=("32-true", "bf16-mixed", "bf16-true"),
    ),
    "INT8Precision": PluginCase(build=lambda precision: INT8Precision(base=precision)),
    "S2FP8Precision": PluginCase(build=lambda precision: S2FP8Precision(base=precision)),
    "StochasticRoundingBF16": PluginCase(
        build=lambda precision: StochasticRoundingBF16(),
        precisions=("bf16-true",),
        refuses=("OptimizerOffload", "ReplaceOptimizer"),
        restores_dtypes=True,
    ),
    "Wang2018FP8Precision": PluginCase(
        build=lambda precision: Wang2018FP8Precision(base=precision, accumulate="float32")
    ),
}
