"""Sequences of a fraction of their full length, from batches of any structure."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from lightning_eff._core._arguments.batch import BatchKeys
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._tokens.sequences import find_sequences, shorten
from lightning_eff._core.session import Session

#: The tensors of a batch that are images or sequences.
Keys = Annotated[list[str | int], BatchKeys(hint="For example ['input_ids', 'labels'] or [0, 1].")]


class Length:
    """Shortens the sequences of each batch.

    Args:
        mode: "reshape" splits a sequence and keeps every token; "truncate" keeps the first ones.
        keys: names or positions of the tensors to shorten along dimension 1; None looks at shapes.
        who: the technique's name, for messages.
    """

    def __init__(self, *, mode: Literal["reshape", "truncate"], keys: Sequence[str | int] | None, who: str) -> None:
        self.mode: Literal["reshape", "truncate"] = mode
        self.keys = None if keys is None else list(keys)
        self._who = who
        self._looked = False
        self.last = 0

    def short(self, session: Session, batch: Any, share: float, shares: Sequence[float]) -> Any:
        """Return the batch at the fraction ``share`` of its length; at 1, the batch itself.

        Args:
            session: the run; an error on the first batch is raised on all of its ranks.
            batch: of any structure.
            share: the fraction of the full length.
            shares: all fractions that the run will use.

        Raises:
            ValueError: on the first batch, if it holds no sequences or they cannot be shortened to one of ``shares``.
        """
        if not self._looked:
            self._looked = True
            on_all_ranks(session, lambda: [self._at(batch, other, first=True) for other in shares])
        return self._at(batch, share, first=False)

    def _at(self, batch: Any, share: float, *, first: bool) -> Any:
        found = find_sequences(batch, self.keys, 2, who=self._who)
        length = round(found.full * share)
        if self.mode == "reshape" and found.full % length:
            if first:
                possible = [d for d in range(1, found.full) if found.full % d == 0]
                raise ValueError(
                    f"{self._who}(mode='reshape'): sequences of {found.full} tokens cannot be split into lengths of"
                    f" {share:g} of that, {found.full * share:g}. Use a fraction that gives one of"
                    f" {', '.join(map(str, possible[-5:]))} tokens, or mode='truncate'."
                )
            length = found.full  # a batch of another length, as with bucketing
        self.last = length
        if length == found.full:
            return batch
        return shorten(batch, found, length, reshape=self.mode == "reshape", who=self._who)
