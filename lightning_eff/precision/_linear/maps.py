"""The linear maps of a module, and which of them stay as they are."""

from collections.abc import Callable, Collection, Sequence

from torch import nn

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core.blocks import candidates

Rule = Callable[["LinearMap"], str | None]


def heads(module: nn.Module, maps: Sequence[LinearMap]) -> set[str]:
    """Paths of linear maps that belong to a head: those outside of all stacks of blocks.

    Where no stack is found these are the last linear map and those that share their weight with an embedding.
    """
    blocks = tuple(f"{found.path}." for found in candidates(module))
    if blocks:
        return {m.path for m in maps if not m.path.startswith(blocks)}
    embedded = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    found = {m.path for m in maps if id(m.module.weight) in embedded}
    return found | {m.path for m in maps[-1:]}


def block_of(path: str, module: nn.Module) -> str:
    """The path of the repeated block that the submodule at ``path`` lies in; empty outside of blocks."""
    for found in candidates(module):
        prefix = f"{found.path}."
        if path.startswith(prefix):
            return prefix + path.removeprefix(prefix).split(".")[0]
    return ""


def sort_out(
    module: nn.Module, skip: Collection[str], rules: Sequence[Rule] = ()
) -> tuple[list[LinearMap], dict[str, str]]:
    """The linear maps to be exchanged, and the others with the reason.

    Args:
        module: the LightningModule.
        skip: "head" leaves the head's maps as they are; anything else that is not a rule's own word names paths:
            a map whose path is one of these, or lies under one, stays.
        rules: each says of a map why it stays, or None.

    Returns:
        The maps chosen, and reasons by path, both in the module's order.
    """
    maps = linear_maps(module)
    outside = heads(module, maps) if "head" in skip else set()
    chosen: list[LinearMap] = []
    kept: dict[str, str] = {}
    for m in maps:
        named = [name for name in skip if m.path == name or m.path.startswith(f"{name}.")]
        reason = unfit(m)
        if reason is None and named:
            reason = f"skip names {named[0]!r}"
        elif reason is None and m.path in outside:
            reason = "a head's: outside the blocks"
        for rule in rules:
            reason = reason or rule(m)
        if reason is None:
            chosen.append(m)
        else:
            kept[str(m)] = reason
    return chosen, kept
