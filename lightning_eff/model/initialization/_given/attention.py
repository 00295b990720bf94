"""Attention and residual branches as users name them, in the form in which they are found otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Kind, Names
from lightning_eff._core._branches.attention import ROLES, Attention, Part
from lightning_eff._core._branches.finding import Branch
from lightning_eff._core._branches.graph import End
from lightning_eff.model.initialization._given.names import outputs_dim, side_by_side


@dataclass(frozen=True, repr=False)
class AttentionLayers(Kind):
    """For each kind of attention a mapping of its roles to the names of weights; kept as a list of dicts.

    Roles that one layer computes in equal parts are joined by +. ``"cross": True`` marks attention to an encoder.
    """

    hint = "Example: [{'query+key+value': 'blocks.*.qkv', 'output': 'blocks.*.proj'}]."

    @property
    @override
    def expected(self) -> str:
        return (
            "a list of mappings of 'query', 'key', 'value' (joined by + where fused) and 'output' to names of weights"
        )

    @override
    def __call__(self, value: Any) -> list[dict[str, Any]]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError
        return [self._entry(entry) for entry in value]

    def _entry(self, entry: Any) -> dict[str, Any]:
        if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
            raise ValueError
        found = dict(entry)
        cross = found.pop("cross", False)
        roles = [role for key in found if key != "output" for role in key.split("+")]
        if sorted(roles) != sorted(ROLES) or not isinstance(cross, bool):
            raise ValueError
        if not all(isinstance(name, str) and name for name in found.values()):
            raise ValueError
        return dict(entry)


@dataclass(frozen=True, repr=False)
class WholeBranches(Kind):
    """For each residual branch the names of its weights; kept as a list of lists."""

    hint = "Example: [['blocks.*.up', 'blocks.*.down']]."

    @property
    @override
    def expected(self) -> str:
        return "a list of lists, each with the names of a branch's weights in their order"

    @override
    def __call__(self, value: Any) -> list[list[str]]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError
        return [list(Names(empty=False)(names)) for names in value]


Given = Sequence[Mapping[str, Any]]
#: The weights of attention, by what they compute.
Attentions = Annotated[Given, AttentionLayers()]
#: The weights of each residual branch, in their order.
Branches = Annotated[Sequence[Sequence[str]], WholeBranches()]


def attentions_given(root: nn.Module, given: Given, *, who: str) -> list[Attention]:
    """Return the attention layers that users name.

    Raises:
        ValueError: for names that match no weight, and for layers whose outputs cannot be divided into the roles.
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
            f" {len(roles)} equal parts for {' and '.join(roles)}. Name the weight of each role, or exclude this one by"
            " maps=[...]."
        )
    size = shape[dim] // len(roles)
    places = torch.arange(shape[dim]) // size
    return {role: Part(weight, dim, places == i) for i, role in enumerate(roles)}


def branches_given(root: nn.Module, given: Sequence[Sequence[str]], *, who: str) -> list[Branch]:
    """Return the residual branches that users name; branches whose names begin alike, up to a number, add to one stream.

    Raises:
        ValueError: for names that match no weight.
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
