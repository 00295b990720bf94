"""Weights by name, by the module that has them, or by a pattern; a name that there is not is answered by those next to it."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_eff._core._architecture.linear_maps import is_conv1d
from lightning_eff._core._branches.ends import biases_beside

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def is_list_of_names(value: Any) -> bool:
    """Whether ``value`` is a list of texts that are not empty."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(n, str) and n for n in value)


def check_branches(branches: Any, *, who: str, example: str = "blocks.*.proj") -> tuple[str, ...] | None:
    """The names of last weights as they were given.

    Raises:
        ValueError: if they are no list of names.
    """
    if branches is not None and not is_list_of_names(branches):
        raise ValueError(
            f"{who}({branches=}): expected names of weights in which residual branches end, or patterns of them, such as"
            f" ['{example}'], or None to look for them."
        )
    return None if branches is None else tuple(branches)


def weights_named(root: nn.Module, name: str, *, who: str, argument: str) -> list[str]:
    """The weights that ``name`` means, in the module's order: one of that name, that module's, or those that a pattern fits.

    Raises:
        ValueError: if there is none, with the names that are next to it, or all.
    """
    known = {n: p for n, p in root.named_parameters() if "bias" not in n.rpartition(".")[2]}
    if name in known:
        return [name]
    if f"{name}.weight" in known:
        return [f"{name}.weight"]
    found = [n for n in known if fnmatchcase(n, name) or fnmatchcase(n.removesuffix(".weight"), name)]
    if found and any(sign in name for sign in "*?["):
        return found
    near = get_close_matches(name, [*known, *(n.removesuffix(".weight") for n in known)], n=3, cutoff=0.6)
    maps = [n for n, p in known.items() if p.ndim > 1]
    next_to = f" Next to it are {', '.join(near)}." if near else ""
    raise ValueError(
        f"{who}({argument}=[{name!r}, ...]): {type(root).__name__} has no such weight; expected names of weights, of their"
        f" modules, or patterns that fit some.{next_to} There are {', '.join(maps) or 'none'}."
    )


def side_by_side(root: nn.Module, names: Sequence[str], *, who: str, argument: str) -> list[tuple[str, ...]]:
    """What several names mean together: the first weight of each, then the second of each, and so on.

    Raises:
        ValueError: if they mean unequal numbers of weights.
    """
    columns = [weights_named(root, name, who=who, argument=argument) for name in names]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(f"{name!r} {len(column)}" for name, column in zip(names, columns, strict=True))
        raise ValueError(
            f"{who}({argument}=...): names of one entry mean unequal numbers of weights ({counts}); expected as many of each,"
            " since the first of each belong together, and so on."
        )
    return [*zip(*columns, strict=True)]


def by_hand(root: nn.Module, names: Sequence[str], *, who: str, argument: str = "branches") -> list[tuple[str, ...]]:
    """The tensors that go with weights which are named: each a branch of its own."""
    known, found = dict(root.named_parameters()), list[tuple[str, ...]]()
    for weight in dict.fromkeys(w for name in names for w in weights_named(root, name, who=who, argument=argument)):
        norm = known[weight].ndim == 1
        bias = weight.removesuffix("weight") + "bias"
        found.append((weight, *((bias,) if norm and bias in known else () if norm else biases_beside(root, weight))))
    return found


def outputs_dim(owner: nn.Module) -> int | None:
    """Along which dimension of the weight of a map its outputs lie; None of a module that is none."""
    if is_conv1d(owner) or isinstance(owner, _TRANSPOSED):
        return 1
    return 0 if isinstance(owner, (nn.Linear, *_CONVOLUTIONS)) else None
