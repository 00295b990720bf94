"""Splits that are always right: one layer with a gathered result, or only the storage of a parameter."""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_eff.strategies._tensor.given import Entry
from lightning_eff.strategies._tensor.sharder import Sharder
from lightning_eff.strategies._tensor.styles import Style, even_dim, is_linear, misfit, names_of, owners
from lightning_eff.strategies._tensor.trace import Record

_SLACK = 0.01  # fraction of a rank's fair part that can stay whole on every rank


def alone(root: nn.Module, size: int, before: Record | None, *, taken: list[Entry], read: bool = False) -> list[Entry]:
    """Return linear layers and embeddings whose weights only they read, each with a style that is always right.

    Args:
        root: the module.
        size: number of tensor-parallel ranks.
        before: the record of one execution; None finds nothing, since it is unknown which code reads the weights.
        taken: entries that do not change.
        read: instead, return layers whose weights other code reads too, to try them. It may read only a dtype.
    """
    if before is None:
        return []
    named = {entry.path for entry in taken}
    called = {call.path for call in before.calls}
    holders = owners(root)
    entries = []
    for path, module in root.named_modules():
        if path in named or path not in called or not (is_linear(module) or isinstance(module, nn.Embedding)):
            continue
        mine = [f"{path}.{name}" for name in names_of(module)]
        if any(name in before.outside for name in mine) is not read:
            continue
        shared = any(len(holders[id(p)]) > 1 for p in module._parameters.values() if p is not None)
        style = _style(module, size) if not shared else _tied_style(module, holders, size)
        if style is not None:
            entries.append(Entry(path, style, "tied" if shared else "right by itself"))
    return entries


def last_layers(root: nn.Module, before: Record) -> list[str]:
    """Return the linear layers whose outputs reach the loss without another layer, such as a language model's head."""
    made: dict[Any, list[str]] = {}
    for call in before.calls:
        if call.left is not None and names_of(root.get_submodule(call.path)):
            made.setdefault(call.left, []).append(call.path)
    found: dict[str, None] = {}
    seen: set[Any] = set()
    todo = [before.end]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found |= dict.fromkeys(path for path in made.get(node, ()) if is_linear(root.get_submodule(path)))
        if node not in made:
            todo.extend(following for following, _ in node.next_functions)
    return [*found]


def _style(module: nn.Module, size: int) -> Style | None:
    names = (
        ("colwise_gather_output", "rowwise_split_input")
        if is_linear(module)
        else ("embedding_rowwise", "embedding_colwise")
    )
    return next((style for name in names if misfit(module, style := Style(name), size) is None), None)


def _tied_style(module: nn.Module, holders: dict[int, list[tuple[str, nn.Module, str]]], size: int) -> Style | None:
    """Return a style for a weight shared by an embedding and a head: both split along one dimension, or neither."""
    weight = module._parameters.get("weight")
    if weight is None:
        return None
    for _, owner, _ in holders[id(weight)]:
        if not (is_linear(owner) or type(owner) is nn.Embedding):
            return None
    rows, width = weight.shape
    if rows % size == 0:
        style = Style("colwise_gather_output" if is_linear(module) else "embedding_rowwise")
    elif width % size == 0:
        style = Style("rowwise_split_input" if is_linear(module) else "embedding_colwise")
    else:
        return None
    return style if misfit(module, style, size) is None else None


def norms(root: nn.Module, before: Record, *, taken: list[Entry]) -> list[Entry]:
    """Return normalization layers on (B, T, features) that can compute only each rank's part of the sequence.

    Args:
        root: the module.
        before: the record of one execution.
        taken: entries that do not change.
    """
    named = {entry.path for entry in taken}
    called = {call.path for call in before.calls}
    shapes = {seen.path: seen.shape for seen in before.prints}
    style = Style("sequence_parallel")
    return [
        Entry(path, style, "option sequence_parallel")
        for path, module in root.named_modules()
        if path in called and path not in named and len(shapes[path]) == 3 and "norm" in type(module).__name__.lower()
        if all(p is not None and p.ndim == 1 for p in module._parameters.values()) and not list(module.buffers())
    ]


def storage(root: nn.Module, sharder: Sharder) -> list[Entry]:
    """Split the storage of whole parameters, largest first, until every rank holds a fair part; reads gather them."""
    whole = sum(param.numel() for param in root.parameters())
    left = {
        id(param): param
        for param in root.parameters()
        if not isinstance(param, DTensor) and type(param) is nn.Parameter and param.is_floating_point()
    }
    remaining = sum(p.numel() for p in root.parameters() if not isinstance(p, DTensor) or not _split(p))
    entries: dict[str, Entry] = {}
    holders = owners(root)
    for param in sorted(left.values(), key=lambda p: -p.numel()):
        if remaining * (sharder.size - 1) <= _SLACK * whole:
            break
        dim = even_dim(param.shape, sharder.size)
        if dim is None:
            continue
        _, owner, name = holders[id(param)][0]
        sharder.store(owner, name, dim)
        remaining -= param.numel()
        for full, _, _ in holders[id(param)]:
            path = full.rpartition(".")[0]
            entries[path] = Entry(path, Style("gather"), "stored in parts, gathered when it is read")
    return list(entries.values())


def _split(param: DTensor) -> bool:
    return any(not placement.is_replicate() for placement in param.placements)
