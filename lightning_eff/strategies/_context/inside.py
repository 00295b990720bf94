"""Show a block's code whole attention, the positions in the sequence and own dropout while it has a rank's tokens."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._attention.calls import Call, CannotReplace
from lightning_eff._core._attention.mode import Replacing
from lightning_eff.strategies._context.messages import Share
from lightning_eff.strategies._tensor.trace import DROPS

Site = tuple[str, int, int]
"""A place in the module's code: file, line and instruction."""

_NOISE = {torch.rand_like, torch.randn_like, torch.bernoulli, Tensor.bernoulli_}


@dataclass
class Seen:
    """Observations of a block's code in a trial.

    Attributes:
        sites: where it reads positions 0, 1, ... up to the number of its tokens.
        calls: for each call of attention, whether its queries and keys are the divided tokens.
        by_hand: the number of softmaxes of attention scores, which are not replaced.
        reason: why a call of attention cannot be divided.
    """

    sites: set[Site] = field(default_factory=set[Site])
    calls: list[bool] = field(default_factory=list[bool])
    by_hand: int = 0
    reason: str = ""


class Inside(Replacing):
    """Runs the code of one call of a block, whose hidden state has the tokens of this rank.

    - Attention gets all tokens and this rank's heads (Ulysses, Jacobs et al. 2023), or all keys and values where the ranks do
      not divide the heads.
    - Where the code reads positions from the number of its tokens (``torch.arange(T)``, ``table[:T]``), it gets those of
      the sequence. Only the places in ``shifted`` do.
    - Dropout differs between ranks. Other random numbers are the same on all of them, because a sample can be dropped as a
      whole.

    Args:
        share: this rank's tokens.
        shifted: the places that read positions.
        calls: for each call of attention in a block, whether it is divided; None decides by lengths.
        who: name of the caller in messages.
        seen: receives what the code does.
    """

    def __init__(
        self,
        share: Share,
        shifted: frozenset[Site],
        calls: Sequence[bool] | None,
        who: str,
        seen: Seen | None = None,
    ) -> None:
        super().__init__(self._attend, who)
        self.share, self.shifted, self.expected, self.seen = share, shifted, calls, seen
        self._attended = 0

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange:
            args = self._range(args, kwargs, sys._getframe(1))
        elif func is Tensor.__getitem__:
            args = (args[0], self._index(args[0], args[1], sys._getframe(1)))
        elif func in _NOISE or (func in DROPS and _drops(args, kwargs)):
            return self._own(lambda: func(*args, **kwargs))
        result = super().__torch_function__(func, types, args, kwargs)
        if self.seen is not None:
            self.seen.by_hand = max(self.seen.by_hand, self.by_hand)
        return result

    # -- positions

    def _shifts(self, frame: Any) -> bool:
        site = frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
        if self.seen is not None:
            self.seen.sites.add(site)
        return site in self.shifted

    def _range(self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Any) -> tuple[Any, ...]:
        numbers = [*args, *(kwargs[name] for name in ("start", "end", "step") if name in kwargs)]
        whole = all(type(number) is int for number in numbers)
        length = self.share.length
        if not whole or numbers not in ([length], [0, length], [0, length, 1]) or not self._shifts(frame):
            return args
        for name in ("start", "end", "step"):
            kwargs.pop(name, None)
        return self.share.start, self.share.start + self.share.length

    def _index(self, table: Tensor, index: Any, frame: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        if any(isinstance(item, Tensor) and item.dtype == torch.bool for item in items):
            return index
        made, dim, share = list(items), 0, self.share
        square = sum(_first(item, share.length) for item in items) > 1  # a mask, which attention needs whole
        for at, item in enumerate(items):
            if item is Ellipsis:
                dim = table.ndim - sum(later is not None for later in items[at + 1 :])
                continue
            if _first(item, share.length) and table.shape[dim] > share.length:
                part = slice(share.whole) if square else slice(share.start, share.start + share.length)
                if table.shape[dim] >= part.stop:
                    made[at] = part if self._shifts(frame) else item
                elif self.seen is None and self._shifts(frame):
                    raise ValueError(
                        f"{self.who}: {frame.f_code.co_filename}:{frame.f_lineno} reads {part.stop} positions of"
                        f" a table of {table.shape[dim]}, built for shorter sequences. Build it for the longest sequence."
                    )
            dim += item is not None
        return tuple(made) if isinstance(index, tuple) else made[0]

    # -- attention

    def _attend(self, call: Call) -> Tensor:
        share, size = self.share, len(self.share.lengths)
        divided = call.query.shape[-2] == call.key.shape[-2] == share.length
        if self.seen is not None:
            self.seen.calls.append(divided)
        if self.expected is not None and self._attended < len(self.expected):
            if self.expected[self._attended] and not divided:
                raise self._cannot(
                    f"it has {call.query.shape[-2]} queries and {call.key.shape[-2]} keys, but this rank has {share.length} of"
                    f" {share.whole} tokens"
                )
            divided = self.expected[self._attended]
        self._attended += 1
        if not divided:
            return self._drawn(call)
        mask = call.mask
        if mask is not None and (mask.shape[-1] not in (1, share.whole) or mask.shape[-2] not in (1, share.whole)):
            raise self._cannot(
                f"the block makes a mask of shape {tuple(mask.shape)} from the {share.length} tokens of a rank, which does not"
                f" cover the {share.whole} of the sequence; pass blocks a mask for the whole sequence, or use is_causal=True"
            )
        if call.query.shape[1] % size:
            return self._rows(call)
        if call.key.shape[1] % size:
            call = replace(call, key=call.whole_key, value=call.whole_value)
        heads = call.query.shape[1] // size
        if mask is not None and mask.shape[1] > 1:
            mask = mask.narrow(1, share.rank * heads, heads)
        query, key, value = (share.to_heads(t) for t in (call.query, call.key, call.value))
        return share.to_tokens(self._drawn(replace(call, query=query, key=key, value=value, mask=mask)))

    def _cannot(self, reason: str) -> CannotReplace:
        if self.seen is not None:
            self.seen.reason = reason
        return CannotReplace(reason)

    def _rows(self, call: Call) -> Tensor:
        """Return the rows of this rank's queries, with the keys and values of all ranks."""
        share, mask = self.share, call.mask
        if mask is not None and mask.shape[-2] > 1:
            mask = mask.narrow(-2, share.start, share.length)
        if call.causal:
            device = call.query.device
            rows = torch.arange(share.start, share.start + share.length, device=device)
            below = torch.arange(share.whole, device=device) <= rows[:, None]
            if mask is None or mask.dtype == torch.bool:
                mask = below[None, None] if mask is None else mask & below
            else:
                mask = mask.masked_fill(~below, -torch.inf)
        key, value = share.gathered(call.key, 2), share.gathered(call.value, 2)
        return self._drawn(replace(call, key=key, value=value, mask=mask, causal=False))

    def _drawn(self, call: Call) -> Tensor:
        return self._own(call.run) if call.dropout else call.run()

    # -- random numbers

    def _own(self, draw: Callable[[], Any]) -> Any:
        """Run ``draw`` with random numbers of this rank; they follow from the common ones, which advance equally."""
        seed = int(torch.randint(2**62, ())) + self.share.rank
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        with torch.random.fork_rng([torch.cuda.current_device()] if cuda else []):
            torch.default_generator.manual_seed(seed)
            if cuda:
                torch.cuda.manual_seed(seed)
            return draw()


def _first(item: Any, length: int) -> bool:
    """Whether an index takes the first ``length`` items."""
    if not isinstance(item, slice) or item.step not in (None, 1) or item.start not in (None, 0):
        return False
    return type(item.stop) is int and item.stop == length


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of dropout draws numbers."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return bool(p and training)
