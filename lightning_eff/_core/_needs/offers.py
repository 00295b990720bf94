"""How the strategy of a run divides it."""

from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import PLAIN, Need, Part, Reasons, refused

#: What lets HybridParallelStrategy do without a part.
_UNDONE = {Part.SHARD: "shard=False", Part.TENSOR: "tensor_parallel_size=1", Part.PIPELINE: "pipeline_parallel_size=1"}


def parts_of(strategy: Strategy) -> tuple[Part, ...]:
    """How ``strategy`` divides a run; nothing where every process holds the whole module, as plain tensors.

    A strategy may say so itself, in a property ``parts``.
    """
    own = getattr(strategy, "parts", None)
    if own is not None:
        return tuple(own)
    if is_a(strategy, DeepSpeedStrategy):  # which is a DDPStrategy to Lightning
        return (Part.ENGINE,)
    if is_a(strategy, SingleDeviceStrategy, DDPStrategy):
        return ()
    if is_a(strategy, FSDPStrategy):
        return (Part.FLAT,)
    if is_a(strategy, ModelParallelStrategy):
        tensor = strategy._tensor_parallel_size != 1  # pyright: ignore[reportAttributeAccessIssue]
        return (Part.SHARD, Part.TENSOR, Part.ITSELF) if tensor else (Part.SHARD, Part.ITSELF)
    return (Part.UNKNOWN,)


def is_plain(strategy: Strategy) -> bool:
    """Whether every rank holds the whole module, as plain tensors."""
    return PLAIN.issuperset(parts_of(strategy))


def refusal(who: str, needs: Need, reasons: Reasons, strategy: Strategy) -> str | None:
    """Why a technique cannot train under ``strategy``, and what to use instead; None where it can.

    Args:
        who: the technique, with the argument that its needs come from, if they come from one.
        needs: of the technique.
        reasons: its own; see :func:`~.needs.refused`.
        strategy: of the run.
    """
    found = refused(needs, reasons, parts_of(strategy))
    if not found:
        return None
    part, why = next(iter(found.items()))
    ways = ["strategy='ddp'"]
    if len(refused(needs, reasons, _UNDONE)) < len(_UNDONE) and not found.keys() & _UNDONE.keys():
        ways.insert(0, "HybridParallelStrategy")
    elif any(p in _UNDONE for p in found) and hasattr(strategy, "parts"):
        ways.insert(0, f"{type(strategy).__name__}({', '.join(_UNDONE[p] for p in found)})")
    name, remove = type(strategy).__name__, who.partition("(")[0]
    return f"{who}: {name} {part.value}, and {why}. Use {' or '.join(ways)}, or remove {remove}."
