"""Which linear maps get something of peft's beside them, and when that is pointless; needs no peft."""

from collections.abc import Sequence

from torch import nn

from lightning_eff._core._architecture.linear_maps import LinearMap, choose
from lightning_eff._core._architecture.naming import meets
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.search_space import RunProfile


def pointless(profile: RunProfile) -> str | None:
    if not profile.num_matrices:
        return "there is no hidden linear map"
    return None if profile.memory_bound else "memory limits neither batch nor model, and all weights end better"


def places(
    root: nn.Module, names: Sequence[str] | None, *, rank: int, bounded: bool, who: str
) -> tuple[list[LinearMap], dict[str, str]]:
    """The maps to act on, and reasons by the names of what is left.

    Args:
        root: the module tree.
        names: those that the user named; None takes all in the stacks of blocks, or all where there is no stack.
        rank: of the factors.
        bounded: whether a map's smaller side bounds it.
        who: the technique, for messages.

    Raises:
        ValueError: for a named map with a smaller side than the rank, and where no map is left.
    """
    maps, left = choose(root, names, who=who)
    stacks = [f"{stack.path}." for stack in candidates(root) if stack.composite and stack.path]
    found: list[LinearMap] = []
    for m in maps:
        named = names is not None and any(meets(m.path, name) for name in names)
        smaller = min(m.in_features, m.out_features)
        if bounded and rank > smaller and named:
            raise ValueError(
                f"{who}(rank={rank}): {m} has rank {smaller} at most; expected no more. Give rank={smaller}, or leave"
                " it out of the names."
            )
        if bounded and rank > smaller:
            left[str(m)] = f"its rank is {smaller} at most, which is below {rank}"
        elif not named and stacks and not m.path.startswith(tuple(stacks)):
            left[str(m)] = "it lies outside of the blocks"
        else:
            found.append(m)
    if not found:
        reasons = "".join(f" {name}: {reason}." for name, reason in left.items())
        lower = "a lower rank, or " if bounded else ""
        raise ValueError(
            f"{who}(rank={rank}): {type(root).__name__} has no linear map to put factors beside.{reasons} Expected"
            f" some. Give {lower}{who}(names=[...]); or take the technique out."
        )
    return found, left
