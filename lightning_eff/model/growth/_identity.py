"""Which parameters of a block must be zero for it to pass its input on unchanged."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core.blocks import hidden_of, split_output
from lightning_eff._core.patches import hook_before

Call = tuple[tuple[Any, ...], dict[str, Any]]


@torch.no_grad()
def is_identity(block: nn.Module, call: Call) -> bool:
    """Return whether ``block`` returns exactly the hidden state in ``call``, its arguments and keywords."""
    args, kwargs = call
    entered = hidden_of(args, kwargs).clone()
    hidden, _ = split_output(block(*args, **kwargs))
    return hidden.shape == entered.shape and bool((hidden == entered).all())


@torch.no_grad()
def zeros_for_identity(block: nn.Module, identity: Callable[[], bool], *, keep: frozenset[int]) -> list[str] | None:
    """Return the parameters of ``block`` that must be 0 for it to be the identity, in as few submodules as possible.

    First all submodules are zeroed. Then each one, in the order in which the block calls them, gets its values back if
    the block is still the identity. Of a pre-norm residual block, this leaves the output projections zeroed. At the end
    all values are restored.

    Args:
        block: the block; a submodule's own parameters are zeroed together.
        identity: calls the block and returns whether it is the identity now.
        keep: ids of parameters that cannot be zeroed, because other modules use them.

    Returns:
        Their names in the block; None if it is not the identity even with all of them 0.
    """
    order: dict[str, int] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            order.setdefault(path, len(order))

        return hook

    def called(path: str) -> int:
        """Return a submodule's place in the calls, or that of the module around it if it is not called by itself."""
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


def used_outside(root: nn.Module, blocks: Iterable[nn.Module]) -> frozenset[int]:
    """Return the ids of the parameters of ``root`` that are used outside ``blocks``."""
    seen, used, todo = {id(block) for block in blocks}, set[int](), [root]
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
    """Make each of ``blocks`` pass its input on unchanged.

    Args:
        blocks: the blocks.
        names: the parameters of a block that were found to do this when they are 0.
        is_identity: returns whether a block is the identity now.
        find: returns the parameters to zero for a block on which ``names`` fail, since weights that were 0 when they
            were found may have changed.

    Returns:
        The names that were found last, and the ids of the zeroed parameters.
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
