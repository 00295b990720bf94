"""A block made the identity: which of its parameters must be zero for it to hand its input on."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core.blocks import hidden_of, split_output
from lightning_eff._core.patches import hook_before

Call = tuple[tuple[Any, ...], dict[str, Any]]


@torch.no_grad()
def is_identity(block: nn.Module, call: Call) -> bool:
    """Whether ``block`` returns the very hidden state that ``call``, its arguments and keywords, brings it."""
    args, kwargs = call
    entered = hidden_of(args, kwargs).clone()
    hidden, _ = split_output(block(*args, **kwargs))
    return hidden.shape == entered.shape and bool((hidden == entered).all())


@torch.no_grad()
def zeros_for_identity(block: nn.Module, identity: Callable[[], bool], *, keep: frozenset[int]) -> list[str] | None:
    """The parameters of ``block`` that must be 0 for it to be the identity: no more submodules of it than need be.

    All submodules are zeroed; then one after the other, in the order in which the block calls them, gets its values
    back if the block is the identity with them. Of a pre-norm residual block this leaves the output projections
    zeroed. Afterwards all values are as they were.

    Args:
        block: the block; a submodule's own parameters are zeroed together.
        identity: calls the block and tells whether it is the identity now.
        keep: ids of parameters that cannot be zeroed, since other modules use them.

    Returns:
        Their names in the block; None if it is not the identity even with all of them 0.
    """
    order: dict[str, int] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            order.setdefault(path, len(order))

        return hook

    def called(path: str) -> int:
        """The place of a submodule in the calls, or of the one around it if it is not called by itself."""
        return order.get(path, 0) if path in order or not path else called(path.rpartition(".")[0])

    owned: dict[str, dict[str, tuple[nn.Parameter, Tensor]]] = {}
    for path, m in block.named_modules():
        for name, p in m.named_parameters(prefix=path, recurse=False):
            if id(p) not in keep:
                owned.setdefault(path, {})[name] = (p, p.detach().clone())
    handles = [hook_before(m, note(path)) for path, m in block.named_modules()]
    try:
        for tensors in owned.values():
            _zero(tensors)
        if not identity():
            return None
        zeroed: list[str] = []
        for path in sorted(owned, key=called):
            _restore(owned[path])
            if not identity():
                _zero(owned[path])
                zeroed += owned[path]
        return zeroed
    finally:
        for handle in handles:
            handle.remove()
        for tensors in owned.values():
            _restore(tensors)


def needed_elsewhere(root: nn.Module, block: nn.Module) -> frozenset[int]:
    """Ids of the parameters in ``root`` that modules use which can be reached without ``block``."""
    seen: set[int] = {id(block)}
    used: set[int] = set()
    todo = [root]
    while todo:
        m = todo.pop()
        if id(m) not in seen:
            seen.add(id(m))
            used |= {id(p) for p in m.parameters(recurse=False)}
            todo += list(m.children())
    return frozenset(used)


@torch.no_grad()
def make_identities(
    blocks: Iterable[nn.Module],
    names: list[str],
    *,
    is_identity: Callable[[nn.Module], bool],
    find: Callable[[nn.Module], list[str]],
) -> tuple[list[str], frozenset[int]]:
    """Let each of ``blocks`` hand its input on.

    Args:
        blocks: the blocks.
        names: the parameters of a block that were found to do it when they are 0.
        is_identity: whether a block is the identity now.
        find: which parameters it takes, for a block that those do not make the identity: weights that were 0 when they
            were found may not be so now.

    Returns:
        The names that were last found, and the ids of the parameters that are 0 for it.
    """
    fresh: set[int] = set()
    for block in blocks:
        parameters = dict(block.named_parameters())
        values = {name: parameters[name].detach().clone() for name in names}
        for name in names:
            parameters[name].zero_()
        if not is_identity(block):
            for name, value in values.items():
                parameters[name].copy_(value)
            names = find(block)
            for name in names:
                parameters[name].zero_()
        fresh |= {id(parameters[name]) for name in names}
    return names, frozenset(fresh)


def _zero(tensors: dict[str, tuple[nn.Parameter, Tensor]]) -> None:
    for p, _ in tensors.values():
        p.zero_()


def _restore(tensors: dict[str, tuple[nn.Parameter, Tensor]]) -> None:
    for p, value in tensors.values():
        p.copy_(value)
