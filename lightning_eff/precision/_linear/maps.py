"""Find the linear layers of a module, and decide which of them to leave unchanged."""

from collections.abc import Callable, Collection, Sequence

from torch import nn

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core.blocks import candidates

Rule = Callable[["LinearMap"], str | None]


def heads(module: nn.Module, maps: Sequence[LinearMap]) -> set[str]:
    """Return the paths of the linear layers of a head: those outside all stacks of blocks.

    In a module without a stack, these are the last linear layer and those that share their weight with an embedding.
    """
    blocks = tuple(f"{found.path}." for found in candidates(module))
    if blocks:
        return {m.path for m in maps if not m.path.startswith(blocks)}
    embedded = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    found = {m.path for m in maps if id(m.module.weight) in embedded}
    return found | {m.path for m in maps[-1:]}


def block_of(path: str, module: nn.Module) -> str:
    """Return the path of the repeated block that contains the submodule at ``path``, or "" outside of blocks."""
    for found in candidates(module):
        prefix = f"{found.path}."
        if path.startswith(prefix):
            return prefix + path.removeprefix(prefix).split(".")[0]
    return ""


def sort_out(
    module: nn.Module, skip: Collection[str], rules: Sequence[Rule] = ()
) -> tuple[list[LinearMap], dict[str, str]]:
    """Return the linear layers to replace, and the reasons why the others stay unchanged.

    Args:
        module: the LightningModule.
        skip: "head" leaves the head's layers unchanged. Any entry that is not a keyword is a path: a layer at that path, or
            below it, stays unchanged.
        rules: functions that return the reason why a layer stays unchanged, or None.

    Returns:
        The chosen layers, and reasons by path, both in the module's order.
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
            reason = "part of the head, outside the blocks"
        for rule in rules:
            reason = reason or rule(m)
        if reason is None:
            chosen.append(m)
        else:
            kept[str(m)] = reason
    return chosen, kept
