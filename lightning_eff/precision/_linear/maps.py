"""The linear maps of a module, and which of them stay as they are."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_eff._core.blocks import candidates

Rule = Callable[["LinearMap"], str | None]


@dataclass(frozen=True)
class LinearMap:
    """A submodule that computes ``x W^T + b``.

    Attributes:
        path: dotted, in the LightningModule.
        module: ``nn.Linear``, or Hugging Face's ``Conv1D``, whose parameter is ``W^T``.
        in_features: K, of ``x``.
        out_features: N, of the result.
        transposed: the parameter is (K, N) and not (N, K).
    """

    path: str
    module: nn.Module
    in_features: int
    out_features: int
    transposed: bool

    def __str__(self) -> str:
        return f"{self.path} ({self.in_features} to {self.out_features})"


def linear_maps(module: nn.Module) -> list[LinearMap]:
    """All ``nn.Linear`` and Hugging Face ``Conv1D`` in ``module``, in its own order, each once."""
    found: list[LinearMap] = []
    for path, m in module.named_modules():
        if isinstance(m, nn.Linear):
            found.append(LinearMap(path, m, m.in_features, m.out_features, transposed=False))
        elif is_conv1d(m):
            k, n = m.weight.shape  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues] -- Conv1D's own layout
            found.append(LinearMap(path, m, int(k), int(n), transposed=True))
    return found


def is_conv1d(m: nn.Module) -> bool:
    """Whether ``m`` is GPT-2's linear map, told without importing transformers."""
    return any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(m).__mro__)


def heads(module: nn.Module, maps: Sequence[LinearMap]) -> set[str]:
    """Paths of linear maps that belong to a head: those outside of all stacks of blocks.

    Where no stack is found these are the last linear map and those that share their weight with an embedding.
    """
    blocks = tuple(f"{found.path}." for found in candidates(module))
    if blocks:
        return {m.path for m in maps if not m.path.startswith(blocks)}
    embedded = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    found = {m.path for m in maps if id(m.module.weight) in embedded}
    return found | {m.path for m in maps[-1:]}


def block_of(path: str, module: nn.Module) -> str:
    """The path of the repeated block that the submodule at ``path`` lies in; empty outside of blocks."""
    for found in candidates(module):
        prefix = f"{found.path}."
        if path.startswith(prefix):
            return prefix + path.removeprefix(prefix).split(".")[0]
    return ""


def sort_out(
    module: nn.Module, skip: Collection[str], rules: Sequence[Rule] = ()
) -> tuple[list[LinearMap], dict[str, str]]:
    """The linear maps to be exchanged, and the others with the reason.

    Args:
        module: the LightningModule.
        skip: "head" leaves the head's maps as they are; anything else that is not a rule's own word names paths:
            a map whose path is one of these, or lies under one, stays.
        rules: each says of a map why it stays, or None.

    Returns:
        The maps chosen, and reasons by path, both in the module's order.
    """
    maps = linear_maps(module)
    outside = heads(module, maps) if "head" in skip else set()
    chosen: list[LinearMap] = []
    kept: dict[str, str] = {}
    for m in maps:
        named = [name for name in skip if m.path == name or m.path.startswith(f"{name}.")]
        reason = None
        if isinstance(m.module, NonDynamicallyQuantizableLinear):
            reason = "its weight is used by nn.MultiheadAttention, which does not call it"
        elif named:
            reason = f"skip names {named[0]!r}"
        elif m.path in outside:
            reason = "a head's: outside the blocks"
        elif isinstance(m.module, nn.Linear) and type(m.module).forward is not nn.Linear.forward:
            reason = "a subclass of nn.Linear with a forward of its own"
        for rule in rules:
            reason = reason or rule(m)
        if reason is None:
            chosen.append(m)
        else:
            kept[str(m)] = reason
    return chosen, kept
