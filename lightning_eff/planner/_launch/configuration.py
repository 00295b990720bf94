"""A layout as a config that ``lightning-eff fit`` runs: strategy, callbacks, precision and batches, with every argument."""

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
    """What the recipe's config says of the run, as far as a plan changes it.

    Attributes:
        callbacks: of the trainer's section, each with ``class_path`` and ``init_args``.
        plugins: likewise.
        precision: the Trainer's name of it, or None.
        batch_key: where the config has the loader's batch size, such as ("data", "init_args", "batch_size"); None where
            it could not be found.
        batch_size: that it has.
        layers: the blocks, by a dotted path, a pattern or a list of paths, or None.
        configs: paths of the configs.
        package: the name of Lightning that the module is written with.
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
    """Samples that the loader of a replica has to give at once: a pipeline divides them, else they are accumulated."""
    return layout.micro_batch * (layout.num_microbatches if layout.pp > 1 else 1)


def strategy(layout: Layout, split: Sequence[range], section: Section) -> dict[str, Any] | str:
    """The strategy with every argument; on one accelerator Lightning's "auto", which knows the device.

    Args:
        layout: which.
        split: the blocks of each stage.
        section: of the recipe.
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
    HybridParallelStrategy(**arguments)  # what it would refuse is not printed
    seconds = {name: int(v.total_seconds()) for name, v in arguments.items() if isinstance(v, timedelta)}
    arguments |= {name: f"{s // 3600}:{s // 60 % 60:02}:{s % 60:02}" for name, s in seconds.items()}
    return {"class_path": "lightning_eff.HybridParallelStrategy", "init_args": arguments}


def callbacks(layout: Layout, layers: str | Sequence[str] | None) -> list[dict[str, Any]]:
    """The techniques of the layout, with every argument."""
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
    """What goes beside the recipe's config, and stands over it.

    Args:
        layout: which.
        split: the blocks of each stage.
        devices: accelerators in a node.
        section: of the recipe.

    Raises:
        ValueError: if the strategy does not take the layout.
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
    """The config as text, headed by the command that runs it."""
    configs = " ".join(f"--config {config}" for config in (*section.configs, path))
    run = f"lightning-eff fit {configs}"
    told = f"On each of the {nodes} nodes, by torchrun or another launcher" if nodes > 1 else "It starts all processes"
    return f"# {run}\n# {told}; {devices} accelerators a node.\n" + yaml.safe_dump(dict(found), sort_keys=False)
