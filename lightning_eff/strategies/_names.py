"""The strategy strings: of which class each is an instance, and with which arguments. Nothing is imported for them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

_HERE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class StrategyName:
    """One of the strings that ``Trainer(strategy=...)`` takes.

    Attributes:
        name: the string.
        module: where the class is.
        cls: the class's name.
        description: for the registry.
        arguments: that the class is made with.
    """

    name: str
    module: str
    cls: str
    description: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


def _compressed() -> Iterator[StrategyName]:
    for hook in ("powersgd", "bf16", "onebit", "qsgd"):
        described = f"DDP with gradients sent by {hook}"
        yield StrategyName(f"ddp_{hook}", f"{_HERE}.compressed_ddp", "CompressedDDPStrategy", described, {"hook": hook})


def _deepspeed() -> Iterator[StrategyName]:
    for name, described, arguments in (
        ("deepspeed_zero_1", "ZeRO stage 1", {"stage": 1}),
        ("deepspeed_zero_2", "ZeRO stage 2", {"stage": 2}),
        ("deepspeed_zero_3", "ZeRO stage 3", {"stage": 3}),
        ("deepspeed_zero_2_offload", "ZeRO stage 2, optimizer in CPU memory", {"stage": 2, "offload": "cpu"}),
        ("deepspeed_zero_3_offload", "ZeRO stage 3, all in CPU memory", {"stage": 3, "offload": "cpu"}),
        ("deepspeed_infinity", "ZeRO-Infinity: stage 3, all on NVMe", {"stage": 3, "offload": "nvme"}),
        ("deepspeed_onebit_adam", "1-bit Adam", {"optimizer": "onebit_adam"}),
        ("deepspeed_zero_one_adam", "0/1 Adam", {"optimizer": "zero_one_adam"}),
        ("deepspeed_onebit_lamb", "1-bit LAMB", {"optimizer": "onebit_lamb"}),
    ):
        yield StrategyName(
            name, f"{_HERE}.deep_speed", "DeepSpeedEffStrategy", f"DeepSpeed: {described}", dict(arguments)
        )


def _hybrid() -> Iterator[StrategyName]:
    """From "hybrid" to "hybrid_shard8_tp8_pp8"."""
    for shard, tensor, pipeline in product((1, 2, 4, 8), repeat=3):
        sizes = {"shard": shard, "tp": tensor, "pp": pipeline}
        name = "hybrid" + "".join(f"_{axis}{size}" for axis, size in sizes.items() if size > 1)
        data = f"data (shards of {shard})" if shard > 1 else "data"
        described = f"Hybrid parallelism of an unchanged module: {data} x tensor {tensor} x pipeline {pipeline}"
        arguments = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        arguments |= {"shard": shard} if shard > 1 else {}
        yield StrategyName(name, f"{_HERE}.hybrid_parallel", "HybridParallelStrategy", described, arguments)


#: All of them.
NAMES: tuple[StrategyName, ...] = (*_compressed(), *_deepspeed(), *_hybrid())


def register(registry: Any, cls: type, known_as: str) -> None:
    """Enter ``cls`` into Lightning's registry under the strings that stand for the class ``known_as``."""
    for name in NAMES:
        if name.cls == known_as:
            registry.register(name.name, cls, name.description, override=True, **name.arguments)
