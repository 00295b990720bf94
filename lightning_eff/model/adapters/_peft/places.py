"""The linear layers that get peft's factors, and when this is pointless; needs no peft."""

from collections.abc import Sequence

from torch import nn

from lightning_eff._core._architecture.linear_maps import LinearMap, choose
from lightning_eff._core._architecture.naming import by_reason, meets
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.search_space import RunProfile
from lightning_eff.model.adapters._adapter import unless_memory_bound


def pointless(profile: RunProfile) -> str | None:
    """Why a search for a faster recipe need not try it, or None."""
    return unless_memory_bound(profile) if profile.num_matrices else "the module has no hidden linear layer"


def places(
    root: nn.Module, names: Sequence[str] | None, *, rank: int, bounded: bool, who: str
) -> tuple[list[LinearMap], dict[str, str]]:
    """The linear layers to act on, and why others are left, by name.

    Args:
        root: the module tree.
        names: the patterns that the user gave; None takes all layers in the stacks of blocks, or all if there is no stack.
        rank: the rank of the factors.
        bounded: whether a layer's smaller side bounds the rank.
        who: the technique, for messages.

    Raises:
        ValueError: for a named layer with a smaller side than the rank, and if no layer is left.
    """
    maps, left = choose(root, names, who=who)
    stacks = [f"{stack.path}." for stack in candidates(root) if stack.composite and stack.path]
    found: list[LinearMap] = []
    for m in maps:
        named = names is not None and any(meets(m.path, name) for name in names)
        smaller = min(m.in_features, m.out_features)
        if bounded and rank > smaller and named:
            raise ValueError(
                f"{who}(rank={rank}): the full rank of {m} is {smaller}. Give rank={smaller} or less, or leave it out of"
                " `names`."
            )
        if bounded and rank > smaller:
            left[str(m)] = f"its full rank is {smaller}, below rank={rank}"
        elif not named and stacks and not m.path.startswith(tuple(stacks)):
            left[str(m)] = "it is outside the blocks"
        else:
            found.append(m)
    if not found:
        lower = "Give a lower rank, name" if bounded else "Name"
        raise ValueError(
            f"{who}(rank={rank}): found no linear layer in {type(root).__name__} to adapt.{by_reason(left)} {lower} some with"
            f" {who}(names=[...]), or remove the callback."
        )
    return found, left
