"""Which layouts and techniques the strategies and plugins accept for a recipe's module."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import nn

from lightning_eff._core._lightning.names import is_overridden, is_subclass
from lightning_eff._core._needs.needs import Part, refused
from lightning_eff._core.optimizers import is_per_parameter
from lightning_eff._core.technique import Technique
from lightning_eff.precision.fp8 import too_small
from lightning_eff.strategies._tensor.given import carried_plan
from lightning_eff.strategies._tensor.styles import PACKED, features, is_linear

_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "num_kv_heads", "nhead")
#: The ways to divide a run, by the names that :class:`Abilities` uses.
_AXES = {Part.SHARD: "shard", Part.TENSOR: "tensor", Part.PIPELINE: "pipeline"}
#: Techniques that a plan chooses itself. Its choice replaces the recipe's.
PLANNED = ("ActivationCompression", "OptimizerOffload", "Rematerialization")


@dataclass(frozen=True)
class Abilities:
    """The options that a plan must not propose, each with the reason.

    Attributes:
        refused: from option to reason. Options: "divided" (parameters in pieces), "shard", "tensor", "pipeline", "fp8" and
            names of techniques.
        must_fp8: the recipe multiplies in FP8 already.
        batch: samples in the loader's batch if the plan cannot set it, else None.
    """

    refused: dict[str, str] = field(default_factory=dict[str, str])
    must_fp8: bool = False
    batch: int | None = None

    def why_not(self, *names: str) -> str | None:
        """The first reason against one of ``names``."""
        return next((self.refused[name] for name in names if name in self.refused), None)


def abilities(
    module: LightningModule,
    *,
    callbacks: Sequence[type],
    plugins: Sequence[dict[str, Any]],
    precision: str,
    optimizer: Any,
    sync_batchnorm: bool,
    fp8: bool,
    batch: int | None,
    without: Sequence[str],
    exact: bool,
) -> Abilities:
    """Repeat the checks of the strategies and techniques that need no run.

    Args:
        module: the recipe's module.
        callbacks: the classes of the recipe's callbacks, without those in :data:`PLANNED`.
        plugins: the trainer section's plugins, with ``class_path`` and ``init_args``.
        precision: the Trainer's name for the precision.
        optimizer: the result of ``configure_optimizers``, or None if that failed.
        sync_batchnorm: the trainer section's ``sync_batchnorm``.
        fp8: a plugin multiplies in FP8.
        batch: see :class:`Abilities`.
        without: options that the user excludes: names of techniques, "shard", "tensor", "pipeline" or "fp8".
        exact: exclude options that change gradients.
    """
    found: dict[str, str] = dict.fromkeys(without, "excluded by --without")
    for cls in callbacks:
        if is_subclass(cls, StochasticWeightAveraging, WeightAveraging, ModelPruning):
            found.setdefault("divided", f"{cls.__name__} needs whole parameters")
        if issubclass(cls, Technique):
            for part, why in refused(cls.needs, cls.refuses, _AXES).items():
                found.setdefault(_AXES[part], f"{cls.__name__} does not support it, since {why}")
        for name in PLANNED:
            if issubclass(cls, Technique) and name in cls.conflicts:
                found.setdefault(name, f"{cls.__name__} refuses it")
        if cls.__name__ == "ActivationOffload":
            found.setdefault("ActivationCompression", "ActivationOffload refuses it")
    if precision == "16-mixed":
        found.setdefault("divided", "the gradient scaler of 16-mixed checks each process alone")
        found.setdefault("OptimizerOffload", "the gradient scaler of 16-mixed unscales on the device")
    names = [str(plugin.get("class_path", "")).rpartition(".")[2] for plugin in plugins]
    for name, plugin in zip(names, plugins, strict=True):
        if name == "ACTPrecision":
            found.setdefault("ActivationCompression", "ACTPrecision already compresses activations")
        if name == "StochasticRoundingBF16":
            found.setdefault("OptimizerOffload", "StochasticRoundingBF16 runs the optimizer's step itself")
        if name.endswith("Precision") or name == "StochasticRoundingBF16":
            found.setdefault("fp8", f"the recipe has {name}")
        if (plugin.get("init_args") or {}).get("amax") == "delayed":
            found.setdefault("pipeline", "FP8 with a delayed amax cannot see a pipeline's backward passes")
    if sync_batchnorm:
        found.setdefault("tensor", "sync_batchnorm communicates across all processes")
        found.setdefault("pipeline", "sync_batchnorm communicates across all processes")
    if is_overridden("backward", module, LightningModule):
        found.setdefault("pipeline", f"{type(module).__name__} overrides backward")
    if optimizer is not None and type(optimizer).__name__ == "LBFGS":
        found.setdefault("divided", "LBFGS needs all parameters in one process")
    if optimizer is None or not is_per_parameter(optimizer):
        found.setdefault("OptimizerOffload", "it supports only optimizers of torch.optim")
    if precision not in ("bf16-mixed", "bf16-true"):
        found.setdefault("fp8", "plans use FP8 only with bf16-mixed or bf16-true")
    if exact:
        found.setdefault("fp8", "it changes gradients (--exact)")
        found.setdefault("ActivationCompression", "it changes gradients (--exact)")
    if fp8:
        found.pop("fp8", None)
    return Abilities(found, must_fp8=fp8, batch=batch)


def widths(blocks: list[nn.Module], module: nn.Module) -> tuple[int, ...]:
    """Return the head counts of the blocks and of the model's config, and the dimensions of the blocks' matrices."""
    found: set[int] = set()
    holders = [m for block in blocks[:1] for m in block.modules()]
    holders += [config for m in module.modules() if blocks and (config := getattr(m, "config", None)) is not None]
    for holder in holders:
        values = (getattr(holder, name, None) for name in _HEADS)
        found |= {value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0}
    for block in blocks[:1]:
        found |= {n for p in block.parameters() if p.ndim == 2 and min(p.shape) > 1 for n in p.shape}
    return tuple(sorted(found))


def carries_pairs(module: nn.Module, blocks: list[nn.Module]) -> bool:
    """Whether a Hugging Face plan in ``module`` divides each pair of a block's linear layers by columns, then by rows.

    The strategy can also find a plan itself, by numbers in the training processes. This check does not rely on that.
    """
    if not blocks:
        return False
    entries, refused = carried_plan(module, 2)
    first = next(path for path, m in module.named_modules() if m is blocks[0])
    styles = [entry.style.name for entry in entries if entry.path.startswith(f"{first}.")]
    columns = any(name in ("colwise", PACKED) for name in styles)
    return columns and styles.count("rowwise") >= 2 and not any(path.startswith(f"{first}.") for path in refused)


def fp8_share(blocks: list[nn.Module]) -> float:
    """Return the fraction of the first block's linear FLOPs in layers that FP8Precision replaces with its default ``skip``."""
    sizes = [features(m) for block in blocks[:1] for m in block.modules() if is_linear(m)]
    every = sum(k * n for k, n in sizes)
    return sum(k * n for k, n in sizes if not too_small(k, n, "tensorwise")) / every if every else 0.0
