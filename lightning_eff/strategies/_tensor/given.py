"""Written plans: the user's mapping, or that of a Hugging Face model."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_eff.strategies._tensor.styles import STYLES, SYNONYMS, Style, is_linear, misfit, parse_style


@dataclass(frozen=True)
class Entry:
    """The style of one module, and the reason."""

    path: str
    style: Style
    why: str


def matches(path: str, pattern: str) -> bool:
    """Whether a dotted path matches a dotted pattern: ``*`` within one name, ``**`` for any number of names."""
    return _match(path.split(".") if path else [], pattern.split("."))


def _match(names: list[str], parts: list[str]) -> bool:
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_match(names[i:], parts[1:]) for i in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _match(names[1:], parts[1:])


def wildcard(path: str) -> str:
    """Replace the indices of layers in ``path`` by ``*``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def given_plan(root: nn.Module, plan: Mapping[str, str], size: int, *, who: str) -> list[Entry]:
    """Return the modules that a user's plan names, each with its style.

    Args:
        root: the LightningModule.
        plan: styles by dotted path or pattern of modules.
        size: number of tensor-parallel ranks.
        who: name of the caller in messages.

    Raises:
        ValueError: if an entry names no module, or a style is unknown or does not fit.
    """
    where = f"{who}(tensor_parallel_plan=...)"
    modules = {
        path: module for path, module in root.named_modules() if path and any(True for _ in module.parameters(False))
    }
    listed = ", ".join(sorted({wildcard(p) for p, m in modules.items()}, key=lambda p: (p.count("."), p)))
    if not plan:
        raise ValueError(
            f'{where}: got an empty plan; expected "auto" or a mapping such as {{"layers.*.fc1": "colwise"}}.'
        )
    entries: dict[str, Entry] = {}
    for pattern, text in plan.items():
        style = parse_style(text, where=f"{where}[{pattern!r}]")
        found = [path for path in modules if matches(path, pattern)]
        if not found:
            raise ValueError(
                f"{where}: the entry {pattern!r} names no module with parameters of {type(root).__name__}; expected a"
                f" dotted path, with * for one name or ** for several. Candidates: {listed}."
            )
        for path in found:
            reason = misfit(modules[path], style, size)
            if reason is not None and style.name == "gather":
                style_here = Style("replicate")
            elif reason is not None:
                raise ValueError(
                    f"{where}: {path!r} cannot be {style} over {size} ranks: {reason}. Give it another style"
                    f" ({', '.join(STYLES)}), or use another tensor_parallel_size."
                )
            else:
                style_here = style
            entries[path] = Entry(path, style_here, f"plan: {pattern}")
    for path in entries:
        if entries[path].style.name in ("colwise", "rowwise"):
            _refuse_split_heads(root, path, size, who=who)
    return list(entries.values())


def heads_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (query heads, key-value heads) of an attention module, or None if it is not one or states no heads.

    An attention module has two or more linear layers and a number of heads. If its name contains attention, its configuration
    can have the number instead.
    """
    if sum(is_linear(child) for child in module.children()) < 2:
        return None
    named = "att" in type(module).__name__.lower()
    for source in (module, getattr(module, "config", None) if named else None):
        query = _count(source, _QUERY)
        if query is not None:
            keys = _count(source, _KEYS) or query
            if source is module and keys == query and named:  # the configuration can have the key-value heads
                config = getattr(module, "config", None)
                keys = next((n for a in _KEYS if type(n := getattr(config, a, None)) is int and n > 0), query)
            return query, min(keys, query)
    return None


def _count(source: Any, names: tuple[str, ...]) -> int | None:
    values = [getattr(source, name, None) for name in names]
    return next((value for value in values if type(value) is int and value > 0), None)


# Styles that are right for any styles of the surrounding modules
_ALONE = (
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "embedding_colwise",
    "gather",
    "replicate",
)
_QUERY = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads", "num_query_heads")
_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_head_kv", "kv_heads")


def _refuse_split_heads(root: nn.Module, path: str, size: int, *, who: str) -> None:
    parent, _, _ = path.rpartition(".")
    if not parent:
        return
    module = root.get_submodule(parent)
    heads = heads_of(module)
    if heads is not None and any(count % size for count in heads):
        raise ValueError(
            f"{who}(tensor_parallel_size={size}): the plan splits {path!r}, but {size} does not divide the {heads[0]} heads and"
            f" {heads[1]} key-value heads of {parent!r}. Use another tensor_parallel_size, or give its projections the styles"
            " colwise_gather_output and rowwise_split_input, which split no head."
        )


def refuse_heads(root: nn.Module, size: int, *, who: str) -> None:
    """Raise ``ValueError`` if ``size`` divides the number of heads of no attention in ``root`` that states one."""
    stated = {path: heads for path, module in root.named_modules() if (heads := heads_of(module)) is not None}
    if stated and all(query % size for query, _ in stated.values()):
        path, (query, _) = next(iter(stated.items()))
        raise ValueError(
            f"{who}(tensor_parallel_size={size}): {path or type(root).__name__!r} has {query} attention heads, which {size}"
            f" does not divide. Use a tensor_parallel_size that divides them, or"
            ' tensor_parallel_plan={"**": "gather"}, which splits the storage of parameters and no computation.'
        )


def carried_plan(root: nn.Module, size: int) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries of the plans of Hugging Face models in ``root``.

    Returns:
        The usable entries, and the reasons by path for named modules that cannot be split in this way.
    """
    entries: dict[str, Entry] = {}
    refused: dict[str, str] = {}
    lone: set[str] = set()
    for prefix, model, plan in _carriers(root):
        named = dict(model.named_modules())
        owned = {name: name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
        for pattern, text in plan.items():
            name = SYNONYMS.get(text, text)
            for path in [p for p in [*named, *owned] if p == pattern or (p and wildcard("." + p)[1:] == pattern)]:
                module_path = path if path in named else owned[path]
                full = f"{prefix}.{module_path}" if prefix and module_path else prefix or module_path
                if path in named and name in _ALONE:
                    lone.add(full)
                if path in owned:
                    refused[full] = f"transformers' {text!r} on the bare parameter {path.rpartition('.')[2]}"
                elif name not in STYLES:
                    refused[full] = f"transformers' {text!r} has no counterpart among torch's styles"
                elif (reason := misfit(named[path], Style(name), size)) is not None:
                    refused[full] = reason
                else:
                    entries[full] = Entry(full, Style(name), f"{type(model).__name__}.tp_plan")
        _drop_split_heads(root, entries, refused, size)
    _drop_partners(entries, {path: why for path, why in refused.items() if path not in lone}, refused)
    return list(entries.values()), refused


def _carriers(root: nn.Module) -> Iterable[tuple[str, nn.Module, Mapping[str, str]]]:
    found: list[str] = []
    for path, module in root.named_modules():
        if any(not outer or path == outer or path.startswith(f"{outer}.") for outer in found):
            continue
        if not hasattr(type(module), "_tp_plan"):
            continue  # wrappers such as PEFT's forward their model's attributes, with other paths
        plan: Any = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
        if isinstance(plan, dict) and plan and hasattr(module, "config"):
            found.append(path)
            yield path, module, plan


def _drop_split_heads(root: nn.Module, entries: dict[str, Entry], refused: dict[str, str], size: int) -> None:
    for path in list(entries):
        parent = path.rpartition(".")[0]
        module = root.get_submodule(parent)
        heads = heads_of(module)
        if heads is not None and any(count % size for count in heads):
            refused[path] = f"{heads[0]} heads and {heads[1]} key-value heads do not both divide by {size}"


def _drop_partners(entries: dict[str, Entry], unsplit: dict[str, str], refused: dict[str, str]) -> None:
    """Drop entries next to a module that stays whole, which are part of its computation, unless always right."""
    why = {path.rpartition(".")[0]: reason for path, reason in unsplit.items()}
    for path, entry in list(entries.items()):
        if path in refused:
            del entries[path]
            continue
        for parent, reason in why.items():
            within = path.rpartition(".")[0] == parent or (parent and path.startswith(f"{parent}."))
            if within and entry.style.name not in _ALONE:
                del entries[path]
                refused[path] = reason
                break
