"""Proposes pairs of layers that split with one sum over ranks, from one execution, for a numerical check.

In a transformer the outputs of one or more linear layers (q, k, v; gate and up) reach another one (o; down) through
computations that treat heads or features separately. If the first layers are split by columns and the last by rows, only the
last one needs a sum over ranks (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053). The autograd graph of a real execution
shows these layers: the way back from a linear layer's input ends at the outputs of other linear layers. It does not show
whether the code between them treats heads separately. So variants are tried, with sections of a fused weight and attributes
that count heads. A variant is accepted only if loss and all gradients equal those of the whole module.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_eff.strategies._tensor.given import Entry, wildcard
from lightning_eff.strategies._tensor.styles import PACKED, WHOLE, Style, features, is_linear, misfit, owners
from lightning_eff.strategies._tensor.trace import Call, Record

_MOST_NODES = 400  # between one linear layer and the next; attention with a rotary embedding has about 60
_HEADS = re.compile(r"head", re.IGNORECASE)
_GROUPS = re.compile(r"group|n_rep|repeat", re.IGNORECASE)  # query heads for each key head
_NOT_HEADS = re.compile(r"dim|size|width|feature|mask", re.IGNORECASE)


@dataclass(frozen=True)
class Pair:
    """Layers ``cols`` whose outputs reach the layer ``row``; modules ``between`` have parameters that act on these outputs."""

    cols: tuple[str, ...]
    row: str
    between: tuple[str, ...]

    @property
    def region(self) -> str:
        """The innermost module that contains them all."""
        return common([*self.cols, self.row])


@dataclass(frozen=True)
class Variant:
    """One way to split a pair: a style for each layer, and attributes to divide by the number of ranks."""

    styles: tuple[tuple[str, Style], ...]
    attributes: tuple[tuple[str, str], ...] = ()

    def entries(self) -> list[Entry]:
        """Return the variant as entries of a plan."""
        divided = ", ".join(dict.fromkeys(name for _, name in self.attributes))
        why = "pair, equal to the whole" + (f"; {divided} divided" if divided else "")
        return [Entry(path, style, why) for path, style in self.styles]


@dataclass
class Group:
    """Pairs with the same structure in different layers, which are split in the same way."""

    pairs: list[Pair] = field(default_factory=list)


def common(paths: list[str]) -> str:
    """Return the dotted path of the innermost module that contains all of ``paths``."""
    parts = [path.split(".")[:-1] for path in paths]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


def _sources(node: Any, ends: dict[Any, str], params: dict[int, str]) -> tuple[set[str], set[str]] | None:
    """Return the layers whose outputs reach ``node``, and the parameters on the way, or None if it is too far."""
    seen, todo = set(), [node]
    cols: set[str] = set()
    between: set[str] = set()
    while todo:
        at = todo.pop()
        if at is None or at in seen:
            continue
        seen.add(at)
        if len(seen) > _MOST_NODES:
            return None
        if at in ends:
            cols.add(ends[at])
            continue
        variable = getattr(at, "variable", None)
        if variable is not None:
            between.add(params.get(id(variable), ""))
        todo.extend(function for function, _ in at.next_functions)
    return cols, between


def pairs(root: nn.Module, before: Record, size: int, *, taken: list[Entry]) -> list[Group]:
    """Return candidates in execution order, grouped by structure.

    Args:
        root: the module.
        before: its execution, with calls.
        size: number of tensor-parallel ranks.
        taken: entries whose modules are skipped.
    """
    named = {entry.path for entry in taken}
    modules = dict(root.named_modules())
    held = owners(root)
    calls: dict[str, list[Call]] = {}
    for call in before.calls:
        if is_linear(modules[call.path]):
            calls.setdefault(call.path, []).append(call)
    free = {path for path in calls if len(calls[path]) == 1 and path not in named and _own(modules[path], held)}
    ends = {call.left: path for path, made in calls.items() for call in made if call.left is not None}
    params = {id(param): name for name, param in root.named_parameters()}
    used: set[str] = set()
    groups: dict[Any, Group] = {}
    for path, (call, *_) in calls.items():
        if path not in free or path in used or call.entered is None:
            continue
        found = _sources(call.entered, ends, params)
        if found is None or not found[0] or not found[0] <= free - used - {path} or "" in found[1]:
            continue
        between = tuple(sorted({name.rpartition(".")[0] for name in found[1]}))
        order = list(calls)
        pair = Pair(tuple(sorted(found[0], key=order.index)), path, between)
        if not _widths_fit(modules, pair, size):
            continue
        used |= {path, *pair.cols}
        groups.setdefault(_make(modules, pair), Group()).pairs.append(pair)
    return list(groups.values())


def _own(module: nn.Module, held: dict[int, list[tuple[str, nn.Module, str]]]) -> bool:
    """Whether no other module holds the module's parameters."""
    return all(len(held[id(param)]) == 1 for param in module._parameters.values() if param is not None)


def _widths_fit(modules: dict[str, nn.Module], pair: Pair, size: int) -> bool:
    width = features(modules[pair.row])[0]
    outs = [features(modules[path])[1] for path in pair.cols]
    return width % size == 0 and max(outs) >= width and misfit(modules[pair.row], Style("rowwise"), size) is None


def _make(modules: dict[str, nn.Module], pair: Pair) -> Any:
    region = pair.region
    cut = len(region) + 1 if region else 0
    inner = tuple((path[cut:], features(modules[path])) for path in (*pair.cols, pair.row))
    return wildcard(region), type(modules[region]).__name__, inner, tuple(path[cut:] for path in pair.between)


def variants(root: nn.Module, pair: Pair, size: int) -> Iterator[Variant]:
    """Yield ways to split ``pair``, the likeliest first; the numerical check rejects wrong ones."""
    modules = dict(root.named_modules())
    width = features(modules[pair.row])[0]
    for styles in _column_styles(modules, pair, width, size):
        sections = {rows for _, style in styles for rows in style.sections}
        heads, groups, widths = _counts(modules, pair, {width, *sections}, size)
        whole = any(style.name == WHOLE for _, style in styles)
        # a single key head stays whole, so the number of query heads per key head is divided too
        choices = (
            [groups, (*heads, *groups), (*heads, *groups, *widths)] if whole else [(), heads, (*heads, *widths), widths]
        )
        rest = [(path, Style("replicated_with_grad_allreduce")) for path in pair.between]
        for attributes in dict.fromkeys(choices):
            yield Variant((*styles, *rest, (pair.row, Style("rowwise"))), attributes)


def divisions(root: nn.Module, before: Record, entries: list[Entry], size: int) -> list[tuple[tuple[str, str], ...]]:
    """Return the attributes that a written plan can require to divide, in the pairs that it splits.

    Returns:
        Choices to try in turn. The first one divides nothing.
    """
    modules = dict(root.named_modules())
    styles = {entry.path: entry.style for entry in entries}
    heads: dict[tuple[str, str], None] = {}
    widths: dict[tuple[str, str], None] = {}
    for group in pairs(root, before, size, taken=[]):
        for pair in group.pairs:
            columns = [
                styles[path] for path in pair.cols if path in styles and styles[path].name in ("colwise", PACKED)
            ]
            if pair.row in styles and styles[pair.row].name == "rowwise" and len(columns) == len(pair.cols):
                known = {features(modules[pair.row])[0], *(rows for style in columns for rows in style.sections)}
                counts = _counts(modules, pair, known, size)
                heads.update(dict.fromkeys(counts[0]))
                widths.update(dict.fromkeys(counts[2]))
    return list(dict.fromkeys([(), tuple(heads), (*heads, *widths), tuple(widths)]))


def _column_styles(
    modules: dict[str, nn.Module], pair: Pair, width: int, size: int
) -> Iterator[tuple[tuple[str, Style], ...]]:
    outs = {path: features(modules[path])[1] for path in pair.cols}
    if len(pair.cols) == 1 and outs[pair.cols[0]] > width:
        (path,) = pair.cols
        rest = outs[path] - width
        sections = [(width,) * (outs[path] // width)] if outs[path] % width == 0 else []
        sections += [(width, rest // 2, rest // 2)] if rest % 2 == 0 else []
        for each in dict.fromkeys(sections):
            style = Style(PACKED, each)
            if misfit(modules[path], style, size) is None:
                yield ((path, style),)
    if all(misfit(modules[path], Style("colwise"), size) is None for path in outs):
        yield tuple((path, Style("colwise")) for path in outs)
    if any(out < width for out in outs.values()):
        styles = {path: Style("colwise" if out >= width else WHOLE) for path, out in outs.items()}
        if all(misfit(modules[path], style, size) is None for path, style in styles.items()):
            yield tuple(styles.items())


def _counts(
    modules: dict[str, nn.Module], pair: Pair, widths_known: set[int], size: int
) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return attributes between the layers that count heads, heads per group, and features, as (path of module, name)."""
    outs = widths_known | {
        features(modules[path])[1] for path in pair.cols if features(modules[path])[1] < max(widths_known)
    }
    region = pair.region
    holders = {region}
    for path in (*pair.cols, pair.row):
        while path != region and path:
            path = path.rpartition(".")[0]
            holders.add(path)
            if not path:
                break
    heads, groups, widths = [], [], []
    for path in sorted(holders):
        module = modules[path]
        if isinstance(module, nn.ModuleList) or (path == "" and region):
            continue
        for name, value in vars(module).items():
            if type(value) is not int or value <= 1 or value % size or name.startswith("_"):
                continue
            if _GROUPS.search(name):
                groups.append((path, name))
            elif _HEADS.search(name) and not _NOT_HEADS.search(name):
                heads.append((path, name))
            elif value in outs:
                widths.append((path, name))
    return tuple(heads), tuple(groups), tuple(widths)
