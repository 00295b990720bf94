"""Weights by name, by the module that has them, or by a pattern."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated

from torch import nn

from lightning_eff._core._architecture.linear_maps import is_conv1d
from lightning_eff._core._arguments.kinds import Names
from lightning_eff._core._branches.ends import biases_beside

#: Names of weights, or patterns of them, in which residual branches end.
Ends = Annotated[
    Sequence[str],
    Names("names or patterns of the weights in which residual branches end", hint="Example: ['blocks.*.proj']."),
]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def weights_named(root: nn.Module, name: str, *, who: str, argument: str) -> list[str]:
    """Return the weights that ``name`` means, in the module's order: a weight, a module's weight, or those that a pattern
    matches.

    Raises:
        ValueError: if there is none, with the closest names.
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
    use = f"Did you mean {', '.join(near)}?" if near else f"Use some of {', '.join(maps[:5]) or 'none'}."
    raise ValueError(
        f"{who}({argument}=[{name!r}, ...]): {type(root).__name__} has no weight, or module with a weight, that matches. {use}"
    )


def side_by_side(root: nn.Module, names: Sequence[str], *, who: str, argument: str) -> list[tuple[str, ...]]:
    """Return the weights that several names mean together: the first of each, then the second of each, and so on.

    Raises:
        ValueError: if they mean different numbers of weights.
    """
    columns = [weights_named(root, name, who=who, argument=argument) for name in names]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(f"{name!r} {len(column)}" for name, column in zip(names, columns, strict=True))
        raise ValueError(
            f"{who}({argument}=...): the names of one entry match different numbers of weights ({counts}). Name as many of"
            " each, since the first of each belong together."
        )
    return [*zip(*columns, strict=True)]


def by_hand(root: nn.Module, names: Sequence[str], *, who: str, argument: str = "branches") -> list[tuple[str, ...]]:
    """Return the tensors that belong to the named weights; each weight is a branch of its own."""
    known, found = dict(root.named_parameters()), list[tuple[str, ...]]()
    for weight in dict.fromkeys(w for name in names for w in weights_named(root, name, who=who, argument=argument)):
        norm = known[weight].ndim == 1
        bias = weight.removesuffix("weight") + "bias"
        found.append((weight, *((bias,) if norm and bias in known else () if norm else biases_beside(root, weight))))
    return found


def outputs_dim(owner: nn.Module) -> int | None:
    """Return the dimension of a linear layer's or convolution's weight that holds its outputs; None for other modules."""
    if is_conv1d(owner) or isinstance(owner, _TRANSPOSED):
        return 1
    return 0 if isinstance(owner, (nn.Linear, *_CONVOLUTIONS)) else None
