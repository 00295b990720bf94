"""Blocks at the front of a stack that run alone, until copies of them follow."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_eff._core.blocks import BlockStack, copy_block, refuse_compiled_around, signature
from lightning_eff._core.optimizers import copy_state
from lightning_eff._core.session import Session


def blocks_of(session: Session, layers: str | Sequence[str] | None, *, who: str, copies: bool = True) -> BlockStack:
    """The stack of blocks at ``layers``, or the longest, called one by one; ``copies`` if some are to be copies of others.

    Raises:
        ValueError: if there is none, or it lies within a compiled module.
    """
    stack = session.stack(layers, who=who, parts=True, copies=copies)
    refuse_compiled_around(session.module, stack.path, who=who)
    return stack


def copied(stack: BlockStack, counts: list[int], *, who: str) -> list[int]:
    """How many blocks run in each stage, ``counts``, if new ones can be copies: block ``j`` of ``j`` modulo those before.

    Raises:
        ValueError: as of :func:`check_copies`.
    """
    check_copies(stack, ((j % active, j) for active, n in pairwise(counts) for j in range(active, n)), who=who)
    return counts


def check_copies(stack: BlockStack, pairs: Iterable[tuple[int, int]], *, who: str) -> None:
    """Raise ``ValueError`` unless the second block of each pair can be a copy of the first.

    A block may have parameters beside its source's (ModernBERT's first one has no norm before its attention): they begin as
    they were made. It may not lack some that its source has, or have them in other shapes.
    """
    for first, second in pairs:
        source, target = (dict(signature(stack.blocks[i])) for i in (first, second))
        differ = sorted(name for name, shape in source.items() if target.get(name) != shape)
        if differ:
            raise ValueError(
                f"{who}: block {second} of {stack} is to be a copy of block {first}, and has other parameters or buffers at"
                f" {differ}; expected the same names and shapes. Copy other blocks (by other stages or groups), name another"
                " stack by layers=, or leave the depth alone."
            )


def show_trained(
    session: Session,
    layers: str | Sequence[str] | None,
    learnt: Mapping[str, Any] | None,
    active: int | None,
    *,
    who: str,
) -> None:
    """Outside of a fit, run as many blocks as training has reached, here or in the checkpoint.

    Args:
        session: the run.
        layers: as of :func:`blocks_of`.
        learnt: the stack's state as training left it; None if there was none.
        active: how many blocks it had reached.
        who: the technique's name, for messages.
    """
    if not learnt or active is None or active == learnt["length"]:
        return
    stack = session.stack(layers, who=who)
    if len(stack) != learnt["length"]:  # another module than the trained one
        return
    refuse_compiled_around(session.module, stack.path, who=who)
    stack.load_state_dict(dict(learnt))
    stack.active = active
    stack.watch(scales=False)
    rank_zero_info(f"{who}: runs the first {stack.active} of {stack}, as many as were trained.")


def check_length(session: Session, layers: str | Sequence[str] | None, state: Mapping[str, Any], *, who: str) -> None:
    """Raise ``ValueError`` if a stack's ``state`` is of another depth than the module has."""
    stack = session.stack(layers, who=who)
    if state["length"] != len(stack):
        raise ValueError(
            f"{who}: the checkpoint is of a module with {state['length']} blocks, and {stack} has {len(stack)}; expected the"
            f" same depth. Build the module with {state['length']} blocks, or start a new fit."
        )


def copy_with_state(
    source: nn.Module, target: nn.Module, optimizers: Sequence[Optimizer], *, copies_state: bool
) -> None:
    """``target := source``, and its optimizer state likewise, or anew."""
    for old, new in copy_block(source, target):
        for optimizer in optimizers:
            optimizer.state.pop(new, None)
        if copies_state:
            copy_state([*optimizers], old, new)
