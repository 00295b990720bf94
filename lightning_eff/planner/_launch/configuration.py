"""Turn a layout into a config for ``lightning-eff fit``: strategy, callbacks, precision and batch size."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import yaml

from lightning_eff.planner._launch.abilities import PLANNED
from lightning_eff.planner.layouts import Layout
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy


@dataclass(frozen=True)
class Section:
    """The parts of the recipe's config that a plan changes.

    Attributes:
        callbacks: the trainer's callbacks, with ``class_path`` and ``init_args``.
        plugins: the trainer's plugins, in the same form.
        precision: the Trainer's name for the precision, or None.
        batch_key: path of the loader's batch size in the config, such as ("data", "init_args", "batch_size"), or None.
        batch_size: the loader's batch size.
        layers: the blocks, as a dotted path, a pattern, a list of paths, or None.
        configs: paths of the configs.
        package: the name of the Lightning package that the module uses.
    """

    callbacks: Sequence[Mapping[str, Any]]
    plugins: Sequence[Mapping[str, Any]]
    precision: str | None
    batch_key: tuple[str, ...] | None
    batch_size: int
    layers: str | Sequence[str] | None
    configs: Sequence[str]
    package: str = "lightning.pytorch"


def loader_batch(layout: Layout) -> int:
    """Return the loader's batch size per replica: a pipeline divides it, other layouts accumulate micro-batches."""
    return layout.micro_batch * (layout.num_microbatches if layout.pp > 1 else 1)


def strategy(layout: Layout, split: Sequence[range], section: Section) -> dict[str, Any] | str:
    """Return the strategy with every argument, or "auto" for a single accelerator.

    Args:
        layout: the layout.
        split: the blocks of each stage.
        section: the recipe's config.
    """
    if layout.plain:
        if layout.gpus == 1:
            return "auto"
        return {
            "class_path": f"{section.package}.strategies.DDPStrategy",
            "init_args": {"gradient_as_bucket_view": True},
        }
    signature = inspect.signature(HybridParallelStrategy.__init__).parameters
    arguments = {name: p.default for name, p in signature.items() if p.default is not p.empty}
    arguments |= {
        "data_parallel_size": layout.dp,
        "shard": False if layout.shard == "none" else layout.shards or True,
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": layout.pp,
        "layers": section.layers,
        "sequence_parallel": False,
    }
    if layout.pp > 1:
        arguments |= {
            "schedule": layout.schedule,
            "num_microbatches": layout.num_microbatches,
            "pipeline_split": [len(blocks) for blocks in split],
        }
    HybridParallelStrategy(**arguments)  # raises here instead of in the user's run
    seconds = {name: int(v.total_seconds()) for name, v in arguments.items() if isinstance(v, timedelta)}
    arguments |= {name: f"{s // 3600}:{s // 60 % 60:02}:{s % 60:02}" for name, s in seconds.items()}
    return {"class_path": "lightning_eff.HybridParallelStrategy", "init_args": arguments}


def callbacks(layout: Layout, layers: str | Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the techniques of the layout, with every argument."""
    found: list[dict[str, Any]] = []
    if layout.remat != "none":
        budget = layout.budget if layout.remat == "optimal" else None
        arguments = {"policy": layout.remat, "memory_budget": budget, "layers": layers, "offload": False}
        found.append({"class_path": "lightning_eff.Rematerialization", "init_args": arguments})
    if layout.bits < 32:
        compression = {
            "bits": layout.bits,
            "method": "group",
            "group_size": 256,
            "stochastic_rounding": True,
            "budget": None,
            "layers": layers,
            "convolutions_only": False,
            "offload": False,
        }
        found.append({"class_path": "lightning_eff.ActivationCompression", "init_args": compression})
    if layout.offload:
        found.append({"class_path": "lightning_eff.OptimizerOffload", "init_args": {"pin_memory": True}})
    return found


def configuration(layout: Layout, split: Sequence[range], devices: int, section: Section) -> dict[str, Any]:
    """Return the config to merge over the recipe's.

    Args:
        layout: the layout.
        split: the blocks of each stage.
        devices: accelerators in each node.
        section: the recipe's config.

    Raises:
        ValueError: if the strategy refuses the layout.
    """
    kept = [dict(c) for c in section.callbacks if str(c["class_path"]).rpartition(".")[2] not in PLANNED]
    plugins = [dict(plugin) for plugin in section.plugins]
    precision = section.precision
    if layout.fp8:
        base = precision or "32-true"
        arguments = {"scaling": "tensorwise", "amax": "dynamic", "history": 16, "base": base}
        arguments |= {"skip": ["head", "small"], "accumulate": "fast", "backend": "auto"}
        plugins.append({"class_path": "lightning_eff.FP8Precision", "init_args": arguments})
        precision = None
    trainer: dict[str, Any] = {
        "accelerator": "gpu",
        "num_nodes": layout.gpus // devices,
        "devices": devices,
        "strategy": strategy(layout, split, section),
        "precision": precision,
        "plugins": plugins or None,
        "callbacks": [*kept, *callbacks(layout, section.layers)] or None,
        "accumulate_grad_batches": 1 if layout.pp > 1 else layout.num_microbatches,
    }
    found: dict[str, Any] = {"trainer": trainer}
    if section.batch_key is not None:
        where: dict[str, Any] = found
        for key in section.batch_key[:-1]:
            where = where.setdefault(key, {})
        where[section.batch_key[-1]] = loader_batch(layout)
    return found


def as_yaml(found: Mapping[str, Any], section: Section, path: str, devices: int, nodes: int) -> str:
    """Return the config as text, after a comment with the command that runs it."""
    configs = " ".join(f"--config {config}" for config in (*section.configs, path))
    run = f"lightning-eff fit {configs}"
    start = (
        f"Run it on each of {nodes} nodes, with torchrun or another launcher"
        if nodes > 1
        else "It starts all processes"
    )
    return f"# {run}\n# {start}; {devices} accelerators per node.\n" + yaml.safe_dump(dict(found), sort_keys=False)
