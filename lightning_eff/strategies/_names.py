"""The strategy strings, each with its class and arguments. This module does not import the classes."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

_HERE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class StrategyName:
    """A string for ``Trainer(strategy=...)``.

    Attributes:
        name: the string.
        module: module of the class.
        cls: name of the class.
        description: text for Lightning's registry.
        arguments: arguments of the class.
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


_AXES = ("shard", "cp", "tp", "pp")


def _written(sizes: Mapping[str, int]) -> str:
    return "hybrid" + "".join(f"_{axis}{sizes[axis]}" for axis in _AXES if sizes.get(axis, 1) > 1)


def _hybrid(sizes: Mapping[str, int]) -> StrategyName:
    shard, context, tensor, pipeline = (sizes.get(axis, 1) for axis in _AXES)
    data = f"data (shards of {shard})" if shard > 1 else "data"
    data += f" x context {context}" if context > 1 else ""
    described = f"Hybrid parallelism of an unchanged module: {data} x tensor {tensor} x pipeline {pipeline}"
    arguments = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    arguments |= {"shard": shard} if shard > 1 else {}
    arguments |= {"context_parallel_size": context} if context > 1 else {}
    return StrategyName(_written(sizes), f"{_HERE}.hybrid_parallel", "HybridParallelStrategy", described, arguments)


#: Those in Lightning's registry; "hybrid" is there up to "hybrid_shard8_tp8_pp8" and "hybrid_shard8_cp8", and takes any sizes.
NAMES: tuple[StrategyName, ...] = (
    *_compressed(),
    *_deepspeed(),
    *(_hybrid(dict(zip(("shard", "tp", "pp"), sizes, strict=True))) for sizes in product((1, 2, 4, 8), repeat=3)),
    *(_hybrid({"shard": shard, "cp": context}) for shard, context in product((1, 2, 4, 8), (2, 4, 8))),
)


def sized(name: str) -> StrategyName | None:
    """Return the hybrid strategy for a name such as "hybrid_pp3_tp12", with sizes in any order, or None."""
    word, *parts = name.lower().split("_")
    found = [re.fullmatch(rf"({'|'.join(_AXES)})([1-9]\d*)", part) for part in parts]
    sizes = {match[1]: int(match[2]) for match in found if match is not None}
    return _hybrid(sizes) if word == "hybrid" and len(sizes) == len(parts) else None


def meant(name: str, known: Iterable[str] = ()) -> str | None:
    """Return the string of this package, with its sizes, that ``name`` misspells.

    Args:
        name: the unknown name.
        known: strings of other packages.

    Returns:
        The string, or None if no string is similar or one of ``known`` is more similar.
    """
    import difflib

    name = name.lower()
    words = re.findall(r"([a-z]+)[_=]?(\d*)", name)
    if words and difflib.get_close_matches(words[0][0], ["hybrid"], cutoff=0.7):
        sizes, long = dict[str, int](), {"tensor": "tp", "pipeline": "pp", "context": "cp"}
        for axis, size in words[1:]:
            right = [a for a in _AXES if a == axis] or difflib.get_close_matches(axis, [*long, "shard"])
            if right and size:
                sizes[long.get(right[0], right[0])] = int(size)
        return _written(sizes)
    ours = [one.name for one in NAMES]
    near = difflib.get_close_matches(name, {*known, *ours}, n=1)
    return near[0] if near and near[0] in ours else None


def wrong(name: str, right: str) -> str:
    """Return the Trainer's message for a misspelt string."""
    others = ", ".join(one.name for one in NAMES if not one.name.startswith("hybrid"))
    return (
        f"Trainer(strategy={name!r}): no strategy has this name. Did you mean {right!r}? lightning_eff has 'hybrid', with"
        f" any sizes of shard, cp, tp and pp behind it (such as 'hybrid_shard8_tp2', 'hybrid_tp4_pp2'), and {others}."
    )


def register(registry: Any, cls: type, known_as: str) -> None:
    """Add ``cls`` to Lightning's registry under the strings of the class ``known_as``."""
    for name in NAMES:
        if name.cls == known_as:
            registry.register(name.name, cls, name.description, override=True, **name.arguments)
