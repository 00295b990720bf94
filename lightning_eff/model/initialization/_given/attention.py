"""Attention and residual branches as users name them, in the form in which they are found otherwise."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_eff._core._branches.attention import ROLES, Attention, Part
from lightning_eff._core._branches.finding import Branch
from lightning_eff._core._branches.graph import End
from lightning_eff.model.initialization._given.names import is_list_of_names, outputs_dim, side_by_side

_EXAMPLE = "[{'query+key+value': 'blocks.*.qkv', 'output': 'blocks.*.proj'}]"
Given = Sequence[Mapping[str, Any]]


def check_attention(attention: Any, *, who: str) -> list[dict[str, Any]] | None:
    """The entries as they were given.

    Raises:
        ValueError: if they are no list of mappings of roles to names.
    """
    if attention is None:
        return None
    entries: Sequence[Any] = attention if isinstance(attention, Sequence) else ()
    right = isinstance(attention, Sequence) and not isinstance(attention, str)
    for entry in entries if right else ():
        roles = (
            [role for key in entry if key not in ("output", "cross") for role in key.split("+")]
            if _is_entry(entry)
            else []
        )
        right = right and sorted(roles) == sorted(ROLES) and isinstance(entry.get("cross", False), bool)
    if not right:
        raise ValueError(
            f"{who}({attention=}): expected for each kind of attention the weights of its query, key, value and output, or of"
            f" several that one map makes in equal parts, joined by +, such as {_EXAMPLE}; with 'cross': True where it attends"
            " to an encoder. None looks for them."
        )
    return [dict(entry) for entry in entries]


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(
        isinstance(key, str) and (key == "cross" or (isinstance(name, str) and name)) for key, name in entry.items()
    )


def attentions_given(root: nn.Module, given: Given, *, who: str) -> list[Attention]:
    """The attentions that users name.

    Raises:
        ValueError: for names that mean no weight, and for maps whose outputs cannot be divided so.
    """
    found: list[Attention] = []
    for entry in given:
        keys = [key for key in entry if key != "cross"]
        for weights in side_by_side(root, [entry[key] for key in keys], who=who, argument="attention"):
            parts: dict[str, Part] = {}
            for key, weight in zip(keys, weights, strict=True):
                if key != "output":
                    parts |= _parts(root, weight, key.split("+"), who=who)
            output = tuple(w for key, w in zip(keys, weights, strict=True) if key == "output")
            one = ((parts["query"],), (parts["key"],), (parts["value"],))
            found.append(Attention(*one, output, bool(entry.get("cross", False))))
    return found


def _parts(root: nn.Module, weight: str, roles: list[str], *, who: str) -> dict[str, Part]:
    path, _, key = weight.rpartition(".")
    owner, shape = root.get_submodule(path), root.get_parameter(weight).shape
    packed = isinstance(owner, nn.MultiheadAttention) and key.endswith("proj_weight")
    dim = 0 if packed else outputs_dim(owner)
    if dim is None or shape[dim] % len(roles):
        raise ValueError(
            f"{who}(attention=...): {weight} of shape {tuple(shape)} ({type(owner).__name__}) cannot be divided into"
            f" {' and '.join(roles)}; expected a linear map of {len(roles)} equal parts. Name maps of their own, or give"
            " maps=[...] without it."
        )
    size = shape[dim] // len(roles)
    places = torch.arange(shape[dim]) // size
    return {role: Part(weight, dim, places == i) for i, role in enumerate(roles)}


def check_whole_branches(branches: Any, *, who: str) -> list[list[str]] | None:
    """The names of each branch's weights as they were given.

    Raises:
        ValueError: if they are no list of lists of names.
    """
    right = isinstance(branches, Sequence) and not isinstance(branches, str)
    if branches is not None and not (right and all(is_list_of_names(names) and names for names in branches)):
        raise ValueError(
            f"{who}({branches=}): expected for each branch the names of its weights in their order, or patterns of them, such"
            " as [['blocks.*.up', 'blocks.*.down']], or None to look for them."
        )
    return None if branches is None else [[*names] for names in branches]


def branches_given(root: nn.Module, given: Sequence[Sequence[str]], *, who: str) -> list[Branch]:
    """The residual branches that users name; those whose names begin alike, up to a number, add to one stream.

    Raises:
        ValueError: for names that mean no weight.
    """
    streams: dict[str, int] = {}
    found: list[Branch] = []
    for names in given:
        for weights in side_by_side(root, names, who=who, argument="branches"):
            parts = weights[-1].split(".")
            first = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
            stream = streams.setdefault(".".join(parts[:first]), len(streams))
            found.append(Branch((End(weights[-1], None, (), (), ()),), weights[:-1], stream, len(weights)))
    return found
