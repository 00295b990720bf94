"""Find the strategies under which each technique trains, from its declarations."""

from collections.abc import Mapping
from typing import Any

from lightning_eff._core._needs.needs import Part, refused

#: How strategies divide a run, by the headings of a table.
LAYOUTS: Mapping[str, tuple[Part, ...]] = {
    "DDP": (),
    "FSDP2": (Part.SHARD, Part.ITSELF),
    "hybrid shard": (Part.SHARD,),
    "hybrid tp": (Part.TENSOR,),
    "hybrid pp": (Part.PIPELINE,),
    "DeepSpeed": (Part.ENGINE,),
}


def reasons(cls: Any) -> dict[str, str]:
    """Return why a technique does not train under each of :data:`LAYOUTS`, or ""; empty for other classes."""
    if not hasattr(cls, "needs"):
        return {}
    found = {layout: refused(cls.needs, cls.refuses, parts) for layout, parts in LAYOUTS.items()}
    return {
        layout: next((f"The strategy {part.value}, and {why}" for part, why in no.items()), "")
        for layout, no in found.items()
    }


def trains_under(cls: Any) -> str:
    """Describe the strategies under which a technique trains; "" for other classes."""
    found = [layout for layout, why in reasons(cls).items() if not why]
    return f"trains under {', '.join(found)}" if found else ""
