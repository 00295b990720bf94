"""Stacks of blocks of which the first run alone, until copies of them follow."""

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
    """Return the stack of blocks at ``layers``, or the longest one.

    Args:
        session: the run.
        layers: the dotted path of the stack; None finds the longest.
        who: the technique's name, for messages.
        copies: whether some blocks are to become copies of others.

    Raises:
        ValueError: if there is none, or it lies within a compiled module.
    """
    stack = session.stack(layers, who=who, parts=True, copies=copies)
    refuse_compiled_around(session.module, stack.path, who=who)
    return stack


def check_distinct(stacks: Sequence[BlockStack], *, who: str, why: str) -> None:
    """Raise ``ValueError`` if a block stands several times in ``stacks``; ``why`` completes the message."""
    blocks = [block for stack in stacks for block in stack.blocks]
    if len({id(block) for block in blocks}) < len(blocks):
        raise ValueError(
            f"{who}: {' and '.join(map(str, stacks))} holds the same block several times, but {why}. Name another stack by"
            f" layers=, or remove {who}."
        )


def copied(stack: BlockStack, counts: list[int], *, who: str) -> list[int]:
    """Return ``counts``, the number of blocks per stage, after checking that new block ``j`` can copy ``j`` modulo those
    before.

    Raises:
        ValueError: as :func:`check_copies`.
    """
    check_copies(stack, ((j % active, j) for active, n in pairwise(counts) for j in range(active, n)), who=who)
    return counts


def check_copies(stack: BlockStack, pairs: Iterable[tuple[int, int]], *, who: str) -> None:
    """Raise ``ValueError`` unless the second block of each pair can be a copy of the first.

    A block may have parameters that its source lacks (ModernBERT's first block has no norm before its attention); they
    keep their initial values. It must have all parameters of its source, in the same shapes.
    """
    for first, second in pairs:
        source, target = (dict(signature(stack.blocks[i])) for i in (first, second))
        differ = sorted(name for name, shape in source.items() if target.get(name) != shape)
        if differ:
            raise ValueError(
                f"{who}: block {second} of {stack} cannot copy block {first}, because their parameters or buffers differ at"
                f" {differ[:5]}. Use other stages or groups, so that other blocks are copied, or name another stack by"
                " layers=."
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
        layers: as for :func:`blocks_of`.
        learnt: the stack's state at the end of training; None if there was none.
        active: the number of blocks that training had reached.
        who: the technique's name, for messages.
    """
    if not learnt or active is None or active == learnt["length"]:
        return
    stack = session.stack(layers, who=who)
    if len(stack) != learnt["length"]:  # not the module that was trained
        return
    refuse_compiled_around(session.module, stack.path, who=who)
    stack.load_state_dict(dict(learnt))
    stack.active = active
    stack.watch(scales=False)
    rank_zero_info(f"{who}: running the first {stack.active} of {stack}, those that were trained.")


def check_length(session: Session, layers: str | Sequence[str] | None, state: Mapping[str, Any], *, who: str) -> None:
    """Raise ``ValueError`` if a stack's ``state`` is of another depth than the module's."""
    stack = session.stack(layers, who=who)
    if state["length"] != len(stack):
        raise ValueError(
            f"{who}: the checkpoint's module has {state['length']} blocks, but {stack} has {len(stack)}. Build the module"
            f" with {state['length']} blocks, or start a new fit."
        )


def copy_with_state(
    source: nn.Module, target: nn.Module, optimizers: Sequence[Optimizer], *, copies_state: bool
) -> None:
    """Copy a block into ``target``, with its optimizer state if ``copies_state``; otherwise the target's state is removed."""
    for old, new in copy_block(source, target):
        for optimizer in optimizers:
            optimizer.state.pop(new, None)
        if copies_state:
            copy_state([*optimizers], old, new)
