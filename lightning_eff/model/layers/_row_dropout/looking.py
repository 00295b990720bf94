"""Finds a module's feed-forward networks on its first batch, and verifies that they compute with fewer units."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_eff._core._branches.ffns import ffns_of
from lightning_eff._core._branches.tracing import traced
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core.session import Session
from lightning_eff.model.layers._row_dropout.patterns import Pattern
from lightning_eff.model.layers._row_dropout.thinning import Thinned


def found(
    session: Session, batch: Any, batch_idx: int, *, most: int, names: Sequence[Sequence[str]] | None, who: str
) -> Thinned | None:
    """The feed-forward networks of the run's module, verified to compute the same with some units as with the others masked.

    It runs three forward passes on the first batch in evaluation mode, and counts their cost. It returns None for a batch
    that the step skips.

    Raises:
        ValueError: if there is none, one has fewer than ``most`` hidden units, the step does not call them as modules, or a
            network does not treat each unit separately. No weight has changed then.
    """
    graph = traced(session, batch, batch_idx, who=who)
    if graph is None:
        return None
    module = session.module
    ffns = ffns_of(module, graph, names, who=who, way_out="remove the callback")
    small = next((ffn for ffn in ffns if ffn.hidden < most), None)
    if small is not None:
        raise ValueError(f"{who}(most={most}): {small} has fewer units than the longest period. Give a smaller `most`.")
    thinned = Thinned(module, ffns)
    thinned.patterns = [Pattern(2, 1)] * len(ffns) if most > 1 else thinned.patterns
    try:
        with thinned.view(True), thinned.watched() as thin:
            traced(session, batch, batch_idx, who=who)
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(
            f"{who}: {type(module).__name__} cannot compute with half of the hidden units of"
            f" {', '.join(map(str, ffns[:3]))}: {first_line(error)}. Its code must read the width from its input; name other"
            " networks by ffn=, or remove the callback."
        ) from error
    with thinned.masked(), thinned.watched() as masked:
        traced(session, batch, batch_idx, who=who)
    differ = [name for name in masked if not _same(thin.get(name, []), masked[name])]
    if differ or not masked:
        raise ValueError(
            f"{who}: {', '.join(differ) or 'every layer'} returns other values with half of the hidden units than with the"
            " others' weights at zero, so it does not treat each unit separately or is not called as a module. Name other"
            " networks by ffn=, or remove the callback."
        )
    return thinned


def _same(few: Sequence[Tensor], all_: Sequence[Tensor]) -> bool:
    """Whether values are equal up to rounding."""
    if len(few) != len(all_):
        return False
    for a, b in zip(few, all_, strict=True):
        coarse = 3e-2 if b.dtype in (torch.bfloat16, torch.float16) else 1e-3
        if a.shape != b.shape or float((a.double() - b.double()).norm()) > coarse * float(b.double().norm()) + 1e-12:
            return False
    return True
