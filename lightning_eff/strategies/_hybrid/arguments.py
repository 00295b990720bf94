"""What a run must be for HybridParallelStrategy, looked at before anything is touched."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from torch.optim import LBFGS, Optimizer

from lightning_eff._core._lightning.names import is_a, is_overridden
from lightning_eff._core.wrapping import WrappingPrecision
from lightning_eff.strategies._hybrid.layout import Layout, check_shard, check_size

INITS = ("all", "rank0", "meta")


@dataclass(frozen=True)
class Settings:
    """The strategy's arguments that say how a replica is divided."""

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
    """``microbatch_weight`` as a function; it may be the dotted path of one.

    Raises:
        ValueError: if nothing has that path.
        TypeError: if it is no function.
    """
    function: Any = given
    if isinstance(given, str):
        module, _, name = given.rpartition(".")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{who}(microbatch_weight={given!r}): cannot be imported ({error}); expected the dotted path of a function"
                " of a micro-batch, such as 'my_package.my_module.number_of_labels'."
            ) from None
    if function is not None and not callable(function):
        raise TypeError(
            f"{who}(microbatch_weight={given!r}): expected a function of a micro-batch that returns a number, or its dotted"
            " path."
        )
    return cast("Callable[[Any], float] | None", function)


def check_arguments(
    *,
    who: str,
    sizes: Mapping[str, Any],
    shard: Any,
    context_parallel_size: Any,
    flags: Mapping[str, Any],
    min_num_params: Any,
    schedule: Any,
    num_microbatches: Any,
    tensor_parallel_plan: Any,
    pipeline_split: Any,
    init_on: Any,
    failure_timeout: Any,
    gather_after_fit: Any = "auto",
    microbatch_weight: Any = None,
) -> None:
    """Raise ``ValueError`` or ``TypeError`` at construction, with what was got, what was expected and the way out."""
    for name, value in sizes.items():
        check_size(name, value, who=who, auto=name == "data_parallel_size")
    check_shard(shard, sizes["data_parallel_size"], who=who)
    check_size("context_parallel_size", context_parallel_size, who=who)
    if context_parallel_size > 1:
        raise ValueError(
            f"{who}({context_parallel_size=}): expected 1. torch's context parallelism runs on GPUs only, and it divides the"
            " sequence under the module's own code, whose positions and loss means would then be computed from a part of"
            " it; benchmarks/context_parallel.py of the repository shows what a module has to do for it by hand. For long"
            " sequences take tensor_parallel_size with sequence_parallel=True, more pipeline stages, or the"
            " Rematerialization technique."
        )
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{who}({name}={value!r}): expected True or False.")
    if gather_after_fit not in (True, False, "auto"):
        raise ValueError(f"{who}({gather_after_fit=}): expected True, False or 'auto'.")
    if flags.get("find_unused_parameters") and (shard is not False or sizes["tensor_parallel_size"] > 1):
        raise ValueError(
            f"{who}(find_unused_parameters=True): that is for torch's DDP, which shard=False without tensor and pipeline"
            " parallelism takes; elsewhere parameters may be without a gradient as it is. Leave it out."
        )
    if isinstance(min_num_params, bool) or not isinstance(min_num_params, int) or min_num_params < 0:
        raise ValueError(f"{who}({min_num_params=}): expected a number of parameters, an integer >= 0.")
    from lightning_eff.strategies._pipeline.order import schedule_name

    schedule_name(str(schedule), who=who)
    if num_microbatches is not None:
        check_size("num_microbatches", num_microbatches, who=who)
    if tensor_parallel_plan != "auto" and not isinstance(tensor_parallel_plan, Mapping):
        raise ValueError(
            f"{who}(tensor_parallel_plan={tensor_parallel_plan!r}): expected 'auto', or a mapping of module paths to styles,"
            " such as {'model.layers.*.mlp.up': 'colwise'}."
        )
    whole = isinstance(pipeline_split, Sequence) and not isinstance(pipeline_split, str)
    if pipeline_split != "balanced" and not whole:
        raise ValueError(
            f"{who}({pipeline_split=}): expected 'balanced', or the number of blocks of each stage, such as [3, 5]."
        )
    idle = {
        "pipeline_parallel_size": {
            "num_microbatches": num_microbatches is not None,
            "pipeline_split": whole,
            "microbatch_weight": microbatch_weight is not None,
        },
        "tensor_parallel_size": {
            "tensor_parallel_plan": tensor_parallel_plan != "auto",
            "sequence_parallel": flags["sequence_parallel"],
        },
    }
    for size, given in idle.items():
        for name, is_given in given.items():
            if is_given and sizes[size] == 1:
                raise ValueError(f"{who}({name}=..., {size}=1): that has no effect; expected {size} > 1, or no {name}.")
    if init_on not in INITS:
        raise ValueError(f"{who}({init_on=}): expected one of {', '.join(map(repr, INITS))}.")
    if failure_timeout is not None and (isinstance(failure_timeout, bool) or not failure_timeout > 0):
        raise ValueError(f"{who}({failure_timeout=}): expected seconds > 0, or None to keep no watch.")


def innermost(plugin: Precision) -> list[Precision]:
    """The precision plugin and those inside it, outermost first."""
    found = [plugin]
    while isinstance(found[-1], WrappingPrecision):
        found.append(found[-1].inner)
    return found


def check_run(trainer: Trainer, module: LightningModule, layout: Layout, *, replicated: bool, who: str) -> None:
    """Raise ``ValueError`` at setup if this run cannot be trained in this layout.

    Args:
        layout: sizes of the mesh.
        replicated: every process holds the whole model.
    """
    divided = not replicated and layout.world > 1
    fitting = trainer.state.fn == "fit"
    if layout.world > 1 and fitting and not module.automatic_optimization:
        raise ValueError(
            f"{who}: {type(module).__name__} has automatic_optimization=False; expected True, since under manual optimization"
            " the module itself calls backward and step, where the strategy cannot come between. Use automatic"
            " optimization, or strategy='ddp'."
        )
    if layout.pipeline > 1 and fitting and is_overridden("backward", module, LightningModule):
        raise ValueError(
            f"{who}(pipeline_parallel_size={layout.pipeline}): {type(module).__name__} overrides backward; expected"
            " LightningModule's own, since the pipeline's schedule runs forward and backward passes of several"
            " micro-batches in turn. Leave the override out, or take pipeline_parallel_size=1."
        )
    if layout.tensor > 1 and fitting and trainer._detect_anomaly:
        raise ValueError(
            f"{who}(tensor_parallel_size={layout.tensor}): got Trainer(detect_anomaly=True), and torch cannot look for nan in"
            " gradients that lie in pieces. Set detect_anomaly=False, or take tensor_parallel_size=1."
        )
    for plugin in innermost(trainer.precision_plugin):
        if layout.pipeline > 1 and getattr(plugin, "amax", None) == "delayed":
            raise ValueError(
                f"{who}(pipeline_parallel_size={layout.pipeline}): got {type(plugin).__name__}(amax='delayed'), which records"
                " what the Trainer's backward passes go through; a pipeline's schedule runs them elsewhere, so nothing would"
                " be recorded. Take amax='dynamic'."
            )
        if divided and getattr(plugin, "scaler", None) is not None and not isinstance(plugin, WrappingPrecision):
            raise ValueError(
                f"{who}: got precision {plugin.precision!r}, whose gradient scaler looks for overflows in each process by"
                " itself, so processes that hold other pieces of the model would scale and skip differently. Take"
                f" precision='bf16-mixed', or {who}(shard=False) without tensor and pipeline parallelism."
            )
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if divided and fitting and is_a(callback, StochasticWeightAveraging, WeightAveraging, ModelPruning):
            raise ValueError(
                f"{who}: got {type(callback).__name__}, which needs the module's parameters whole and in one process; with"
                f" {layout} each process has a part. Take the callback out, or {who}(shard=False) without tensor and"
                " pipeline parallelism."
            )
    if layout.model_parallel and trainer.strategy._layer_sync is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            f"{who}: got sync_batchnorm=True with {layout}; expected False, since its messages go over all processes, and"
            " not over the replicas alone. Take it out, or use group or layer norm."
        )


def check_optimizers(optimizers: Sequence[Optimizer], layout: Layout, *, replicated: bool, who: str) -> None:
    """Raise ``ValueError`` if an optimizer looks at all parameters together, of which each process has a part."""
    for optimizer in optimizers:
        if layout.world > 1 and not replicated and isinstance(optimizer, LBFGS):
            raise ValueError(
                f"{who}: got {type(optimizer).__name__}, whose direction follows from products over all parameters, of which"
                f" each process has a part with {layout}; expected an optimizer that treats each parameter by itself. Take"
                f" AdamW or SGD, or {who}(shard=False) without tensor and pipeline parallelism."
            )
