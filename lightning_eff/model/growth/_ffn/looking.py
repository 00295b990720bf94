"""The search for a module's feed-forward networks on its first batch, and the check that narrow ones keep their function."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core._branches.ffns import FFN, ffns_of
from lightning_eff._core._branches.graph import Graph, Node
from lightning_eff._core._branches.tracing import traced
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core.passes import loss_of, restoring, unseen
from lightning_eff._core.patches import hook_behind
from lightning_eff._core.session import Session
from lightning_eff.model.growth._ffn.width import Width

Seen = dict[str, list[Tensor]]


def narrowed(
    session: Session,
    batch: Any,
    batch_idx: int,
    *,
    shares: Sequence[float],
    names: Sequence[Sequence[str]] | None,
    who: str,
) -> Width | None:
    """Return the feed-forward networks of the run's module at the first of ``shares``, checked to act and to keep their
    function.

    It costs three forward passes on the run's first batch, which are counted.

    Args:
        session: the run.
        batch: on the device.
        batch_idx: its index.
        shares: the fractions of all hidden units, growing: each must give a whole number, a multiple of the one before.
        names: the networks as the user names them; None searches for them.
        who: the technique's name, for messages.

    Returns:
        The networks; None if the step skips this batch.

    Raises:
        ValueError: if there are none, they cannot be so narrow, the step does not call them as modules, or a network
            does not treat each hidden unit by itself. No weight has changed then.
    """
    plain = traced(session, batch, batch_idx, who=who)
    if plain is None:
        return None
    ffns = ffns_of(session.module, plain, names, who=who, way_out="use width=None")
    check_units(ffns, shares, who=who)
    width = Width(session.module, ffns, shares[0])
    if shares[0] < 1.0:
        with restoring(width.parameters()):
            try:
                _try(session, batch, batch_idx, width, who=who)
            finally:
                width.share = shares[0]
        width.clear()
    return width


def check_units(ffns: Sequence[FFN], shares: Sequence[float], *, who: str) -> None:
    """Raise ``ValueError`` if a network cannot have these numbers of hidden units, each by repeating the one before."""
    for ffn in ffns:
        units = [round(ffn.hidden * share) for share in shares]
        whole = all(abs(ffn.hidden * share - n) < 0.02 and n >= 1 for share, n in zip(shares, units, strict=True))
        if whole and all(more % n == 0 for n, more in pairwise(units)):
            continue
        possible = [f"1/{k}" for k in range(2, 9) if ffn.hidden % k == 0]
        raise ValueError(
            f"{who}(width=...): the fractions {[*shares]} of {ffn} give {[ffn.hidden * share for share in shares]} hidden"
            " units, not whole numbers that are multiples of the one before. Fractions that this network can begin with:"
            f" {', '.join(possible[:5]) or 'none'}."
        )


def _try(session: Session, batch: Any, batch_idx: int, width: Width, *, who: str) -> None:
    """Narrow the networks and widen them again, and check that only narrow weights were used and the values stay the same."""
    module = session.module
    width.clear()
    width.made = []
    try:
        with width.view(True), _watched(module, width) as narrow:
            graph = traced(session, batch, batch_idx, who=who)
        assert graph is not None, "the same batch was not skipped before"
        unused = _used_whole(graph, width)
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(
            f"{who}: {type(module).__name__} cannot compute with {width.share:g} of the hidden units of"
            f" {', '.join(map(str, width.ffns[:3]))}: {first_line(error)}. Name other networks by ffn=, or use width=None."
        ) from error
    finally:
        width.made = None
    if unused:
        raise ValueError(
            f"{who}: {type(module).__name__} uses {', '.join(unused[:5])} without calling the modules that own them, so"
            " nothing would be saved. Name other networks by ffn=, or use width=None."
        )
    share = width.share
    width.grow(1.0)
    with unseen(session), _watched(module, width) as full:
        loss_of(session, batch, batch_idx, whole=True)
    differ = [name for name in narrow if not _same(narrow[name], full.get(name, []))]
    if differ:
        raise ValueError(
            f"{who}: repeating hidden units changes the values of {', '.join(differ[:5])}, compared with {share:g} of the"
            " units, so these networks do not treat each hidden unit by itself. Name other networks by ffn=, or use"
            " width=None."
        )


def _used_whole(graph: Graph, width: Width) -> list[str]:
    """Return the names of parameters from which something other than their narrow part was computed."""
    made: set[Node] = set()
    for tensor in width.made or ():
        todo = [tensor.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in made:
                made.add(node)
                todo += [f for f, _ in node.next_functions]
    names = {part.name for ffn in width.ffns for part in ffn.parts}
    return sorted(
        {
            graph.leaves[f][0]
            for node, inputs in graph.inputs.items()
            for f in inputs
            if f in graph.leaves and graph.leaves[f][0] in names and node not in made
        }
    )


@contextmanager
def _watched(module: nn.Module, width: Width) -> Iterator[Seen]:
    """Record the inputs and outputs of the modules that own the output layers."""
    seen: Seen = {}
    handles: list[Any] = []
    for ffn in width.ffns:
        owner, _, _ = ffn.parts[-1].name.rpartition(".")
        handles.append(hook_behind(module.get_submodule(owner), _note(seen, ffn)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _note(seen: Seen, ffn: FFN) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        values = [t.detach() for t in (*args[:1], output) if isinstance(t, Tensor)]
        seen.setdefault(ffn.parts[-1].name, values)

    return hook


def _same(narrow: list[Tensor], full: list[Tensor]) -> bool:
    """Return whether values are equal up to rounding, where repeated hidden units count once."""
    if len(narrow) != len(full):
        return False
    for a, b in zip(narrow, full, strict=True):
        if a.shape != b.shape:
            if a.shape[:-1] != b.shape[:-1] or b.shape[-1] % a.shape[-1]:
                return False
            a = a.repeat(*[1] * (a.ndim - 1), b.shape[-1] // a.shape[-1])
        coarse = 3e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-3
        if float((a.double() - b.double()).norm()) > coarse * float(b.double().norm()) + 1e-12:
            return False
    return True
