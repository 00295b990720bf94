"""Checks of HybridParallelStrategy's arguments and run, made before anything is changed."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from torch.optim import LBFGS, Optimizer

from lightning_eff._core._arguments.kinds import Count, Each, Either, Function, OneOf, Text
from lightning_eff._core._arguments.objects import Table
from lightning_eff._core._lightning.names import is_a, is_overridden
from lightning_eff._core.wrapping import WrappingPrecision
from lightning_eff.strategies._hybrid.layout import Layout, check_shard

_STYLES = Table("module paths", Text("a style"), hint="Example: {'model.layers.*.mlp.up': 'colwise'}.")
_SIZES = Each(Count(), hint="Give the number of blocks of each stage, such as [3, 5].")
_WEIGHT = Either(Function("a micro-batch that returns a number"), Text("its dotted path"))

TensorPlan = Annotated[Literal["auto"] | Mapping[str, str], Either(OneOf("auto"), _STYLES, hint=_STYLES.hint)]
PipelineSplit = Annotated[Literal["balanced"] | Sequence[int], Either(OneOf("balanced"), _SIZES, hint=_SIZES.hint)]
Weight = Annotated[Callable[[Any], float] | str, _WEIGHT]


@dataclass(frozen=True)
class Settings:
    """The strategy's arguments that decide how a replica is divided."""

    shard: bool | int
    min_num_params: int
    schedule: str
    num_microbatches: int | None
    layers: str | Sequence[str] | None
    tensor_parallel_plan: Literal["auto"] | Mapping[str, str]
    pipeline_split: Literal["balanced"] | Sequence[int]
    sequence_parallel: bool
    microbatch_weight: Callable[[Any], float] | None = None


def imported(given: Any, *, who: str) -> Callable[[Any], float] | None:
    """Return ``microbatch_weight`` as a function, and import it if it is a dotted path.

    Raises:
        ValueError: if the path cannot be imported.
        TypeError: if it is not a function.
    """
    function: Any = given
    if isinstance(given, str):
        module, _, name = given.rpartition(".")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{who}(microbatch_weight={given!r}): cannot be imported ({error}). Give the dotted path of a function of a"
                " micro-batch, such as 'my_package.my_module.number_of_labels'."
            ) from None
    if function is not None and not callable(function):
        raise TypeError(
            f"{who}(microbatch_weight={given!r}): expected a function of a micro-batch that returns a number, or its dotted"
            " path."
        )
    return cast("Callable[[Any], float] | None", function)


def check_arguments(
    settings: Settings,
    *,
    data_parallel_size: int | str,
    sizes: Mapping[str, int],
    context_parallel_size: int,
    find_unused_parameters: bool,
    who: str,
) -> None:
    """Raise ``ValueError`` if arguments contradict each other, or for a value that no declaration describes."""
    check_shard(settings.shard, data_parallel_size, who=who)
    for name, size in sizes.items():
        if context_parallel_size > 1 and size > 1:
            raise ValueError(
                f"{who}({context_parallel_size=}, {name}={size}): context parallelism does not work together with tensor or"
                f" pipeline parallelism yet. Set {name}=1, or context_parallel_size=1."
            )
    if find_unused_parameters and (settings.shard is not False or sizes["tensor_parallel_size"] > 1):
        raise ValueError(
            f"{who}(find_unused_parameters=True): this is an option of torch's DDP, which is used only with shard=False and"
            " without tensor or pipeline parallelism. Leave it out: other layouts allow parameters without a gradient."
        )
    from lightning_eff.strategies._pipeline.order import schedule_name

    schedule_name(str(settings.schedule), who=who)
    idle = {
        "pipeline_parallel_size": {
            "num_microbatches": settings.num_microbatches is not None,
            "pipeline_split": settings.pipeline_split != "balanced",
            "microbatch_weight": settings.microbatch_weight is not None,
        },
        "tensor_parallel_size": {
            "tensor_parallel_plan": settings.tensor_parallel_plan != "auto",
            "sequence_parallel": settings.sequence_parallel,
        },
    }
    for size, given in idle.items():
        for name, is_given in given.items():
            if is_given and sizes[size] == 1:
                raise ValueError(f"{who}({name}=..., {size}=1): {name} has no effect. Leave it out, or set {size} > 1.")


def innermost(plugin: Precision) -> list[Precision]:
    """The precision plugin and those inside it, outermost first."""
    found = [plugin]
    while isinstance(found[-1], WrappingPrecision):
        found.append(found[-1].inner)
    return found


def check_run(trainer: Trainer, module: LightningModule, layout: Layout, *, replicated: bool, who: str) -> None:
    """Raise ``ValueError`` at setup if this run cannot be trained in this layout.

    Args:
        layout: the sizes of the mesh.
        replicated: whether every process holds the whole model.
    """
    divided = not replicated and layout.world > 1
    fitting = trainer.state.fn == "fit"
    if layout.world > 1 and fitting and not module.automatic_optimization:
        raise ValueError(
            f"{who}: {type(module).__name__} has automatic_optimization=False, so the module itself calls backward and step,"
            " and the strategy cannot intervene. Use automatic optimization, or strategy='ddp'."
        )
    if layout.pipeline > 1 and fitting and is_overridden("backward", module, LightningModule):
        raise ValueError(
            f"{who}(pipeline_parallel_size={layout.pipeline}): {type(module).__name__} overrides backward, but"
            " the pipeline's schedule runs the backward passes of several micro-batches itself. Remove the override, or set"
            " pipeline_parallel_size=1."
        )
    if layout.tensor > 1 and fitting and trainer._detect_anomaly:
        raise ValueError(
            f"{who}(tensor_parallel_size={layout.tensor}): got Trainer(detect_anomaly=True), and torch cannot look for nan in"
            " sharded gradients. Set detect_anomaly=False, or tensor_parallel_size=1."
        )
    for plugin in innermost(trainer.precision_plugin):
        if layout.pipeline > 1 and getattr(plugin, "amax", None) == "delayed":
            raise ValueError(
                f"{who}(pipeline_parallel_size={layout.pipeline}): got {type(plugin).__name__}(amax='delayed'), which records"
                " values in the Trainer's backward passes, but a pipeline's schedule runs them elsewhere. Set amax='dynamic'."
            )
        if divided and getattr(plugin, "scaler", None) is not None and not isinstance(plugin, WrappingPrecision):
            raise ValueError(
                f"{who}: got precision {plugin.precision!r}, whose gradient scaler looks for overflows in each process"
                " separately, so processes with different parts of the model would scale and skip differently. Use"
                f" precision='bf16-mixed', or {who}(shard=False) without tensor and pipeline parallelism."
            )
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if divided and fitting and is_a(callback, StochasticWeightAveraging, WeightAveraging, ModelPruning):
            raise ValueError(
                f"{who}: got {type(callback).__name__}, which needs all of the module's parameters in one process; with"
                f" {layout} each process has a part. Remove the callback, or use {who}(shard=False) without tensor and"
                " pipeline parallelism."
            )
    if layout.shares_samples and trainer.strategy._layer_sync is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            f"{who}: got sync_batchnorm=True with {layout}, but its messages go to all processes and not only to the replicas."
            " Set sync_batchnorm=False, or use group or layer norm."
        )


def check_optimizers(optimizers: Sequence[Optimizer], layout: Layout, *, replicated: bool, who: str) -> None:
    """Raise ``ValueError`` if an optimizer needs all parameters together and each process has only a part."""
    for optimizer in optimizers:
        if layout.world > 1 and not replicated and isinstance(optimizer, LBFGS):
            raise ValueError(
                f"{who}: got {type(optimizer).__name__}, which computes products over all parameters, but with {layout} each"
                " process has only a part of them. Use an optimizer that treats each parameter separately, such as AdamW or"
                f" SGD, or {who}(shard=False) without tensor and pipeline parallelism."
            )
