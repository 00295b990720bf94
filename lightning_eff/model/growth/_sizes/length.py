"""Sequences of a share of their full length, from batches of any make."""

from collections.abc import Sequence
from typing import Any, Literal

from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._tokens.sequences import check_shortening, find_sequences, shorten
from lightning_eff._core.session import Session


class Length:
    """The length of a step's sequences.

    Args:
        mode: "reshape" splits a sequence and keeps every token; "truncate" keeps the first ones.
        keys: names or positions of the tensors to cut along dimension 1; None looks at shapes.
        who: the technique's name, for messages.
    """

    def __init__(self, *, mode: Literal["reshape", "truncate"], keys: Sequence[str | int] | None, who: str) -> None:
        check_shortening(mode, keys, who=who)
        self.mode: Literal["reshape", "truncate"] = mode
        self.keys = None if keys is None else list(keys)
        self._who = who
        self._looked = False
        self.last = 0

    def short(self, session: Session, batch: Any, share: float, shares: Sequence[float]) -> Any:
        """The batch at ``share`` of its length; the batch itself at 1.

        Args:
            session: the run; what is wrong with the first batch is raised on all of its ranks.
            batch: of any make.
            share: of the full length.
            shares: all that the run takes.

        Raises:
            ValueError: at the first batch, if it holds no sequences, or cannot be so short.
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
                    f"{self._who}(mode='reshape'): the first batch has sequences of {found.full} tokens, of which"
                    f" {share:g} are {found.full * share:g}; expected a length that they split into: {possible}. Give"
                    " another share, or mode='truncate'."
                )
            length = found.full  # a batch of another length, as of bucketing
        self.last = length
        if length == found.full:
            return batch
        return shorten(batch, found, length, reshape=self.mode == "reshape", who=self._who)
