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

#: The HybridParallelStrategy argument that disables each part.
_UNDONE = {
    Part.SHARD: "shard=False",
    Part.TENSOR: "tensor_parallel_size=1",
    Part.PIPELINE: "pipeline_parallel_size=1",
    Part.CONTEXT: "context_parallel_size=1",
}


def parts_of(strategy: Strategy) -> tuple[Part, ...]:
    """Return how ``strategy`` divides a run; empty if every process has the whole module, as plain tensors.

    A strategy may declare this in a property ``parts``.
    """
    own = getattr(strategy, "parts", None)
    if own is not None:
        return tuple(own)
    if is_a(strategy, DeepSpeedStrategy):  # a subclass of DDPStrategy
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
    """Return whether every rank has the whole module, as plain tensors."""
    return PLAIN.issuperset(parts_of(strategy))


def refusal(who: str, needs: Need, reasons: Reasons, strategy: Strategy) -> str | None:
    """Return why a technique cannot train under ``strategy``, and what to use instead; None if it can.

    Args:
        who: the technique, with the argument that causes its needs, if one does.
        needs: the technique's needs.
        reasons: its own reasons; see :func:`~.needs.refused`.
        strategy: the run's strategy.
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
