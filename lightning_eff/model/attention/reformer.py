"""Reformer's attention: each query sees the keys in its bucket of a locality-sensitive hash (Kitaev et al. 2020).

The rule is in ``_replacing.hashing``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.kinds import Alias, Count, Kind
from lightning_eff._core._attention.calls import Call, CannotReplace
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff.model.attention._replacing.hashing import buckets_of, hashed_attention, num_chunks
from lightning_eff.model.attention._replacing.masks import in_full, refuse_dropout, visible_keys
from lightning_eff.model.attention._replacing.technique import (
    EXACT,
    NO_PAIRS,
    OUTSIDE,
    ReplacedAttention,
    too_short,
)

WHO = "Reformer"


@dataclass(frozen=True, repr=False)
class Buckets(Kind):
    """An even number of buckets, 1 or 0."""

    hint = "1 is exact attention, and 0 is plain training."

    @property
    @override
    def expected(self) -> str:
        return "an even integer >= 0, or 1"

    @override
    def __call__(self, value: Any) -> int:
        count = Count(at_least=0)(value)
        if count % 2 and count != 1:
            raise ValueError
        return count


class Reformer(ReplacedAttention):
    """Let each query see only the keys that hash to its bucket, in windows of bounded size.

    A hash is ``argmax [x R; -x R]`` of the direction of a query or key, with a random R (E, buckets / 2). R is drawn
    anew in each optimizer step of training, and once for evaluation. Queries that share a bucket are put into chunks of
    ``L / buckets``, and each chunk sees a window of twice as many keys of the bucket around its own place. A pair that
    meets in several rounds of hashing counts once. A query that meets no key sees the key of its own place. Attention
    over the pairs that meet is exact, and with one bucket it is ordinary attention. Causal attention, masks that hide
    padding, and grouped queries are supported.

    **Where it pays.** A round computes about ``6 L^2 / buckets`` pairs. Sorting and gathering cost more than this saves
    below about 8,000 tokens, where fused exact attention is faster on a GPU. It changes the model, so train with it
    from the start or fine-tune with it. It adds no parameter, and acts in evaluation only under a Trainer that has it.

    Differences from the paper:

    - The paper uses the normalised queries as keys, so that similar tokens meet. An unchanged module has keys of its
      own, so here queries and keys meet if their directions are similar.
    - The paper sorts all tokens together, so under causal attention later tokens decide which earlier keys a query
      sees. Here a window follows from the keys that the query may see, so later tokens and padding never change an
      output.
    - A token may see itself.
    - The reversible layers are not included.

    Logged: ``attentions``, the calls in the last step; ``pairs``, the number of pairs of L^2 whose weights are
    computed, over all rounds.

    Args:
        buckets: the number of buckets. 1 is exact attention, and 0 is plain training. Also accepted as ``num_buckets``.
        rounds: the number of rounds of hashing. Also accepted as ``num_hashes``.

    Raises:
        ValueError: for a value out of range. At setup, for compiled modules. At the first batch, before any weight has
            changed, if there is no attention or a call cannot be replaced: it drops weights, its mask says more than
            what is padding and whether it is causal, or it is not self-attention. A later batch with such a mask raises
            it too.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[Reformer(buckets=32, rounds=4)])

    References:
        Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451.
    """

    saves = "the quadratic cost of attention, above about 8,000 tokens; changes the model"
    paper = "Kitaev et al. 2020, arXiv:2001.04451"
    constraints = (
        "self-attention by scaled_dot_product_attention or nn.MultiheadAttention, without dropout of weights, not compiled;"
        " pays for thousands of tokens"
    )
    search_space = SearchSpace({"buckets": Choice((8, 32)), "rounds": Choice((1, 4))}, too_short)
    control = EXACT
    conflicts: ClassVar[Mapping[str, str]] = {
        **OUTSIDE,
        **dict.fromkeys(
            (
                "MemoryEfficientAttention",
                "SangerAttention",
                "A3Attention",
                "ELSAAttention",
                "DOTAAttention",
                "Performer",
                "Linformer",
                "Fastformer",
                "AttentionWindowWarmup",
                "NarrowAttention",
                "TokenMerging",
            ),
            NO_PAIRS,
        ),
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"buckets": 0}
    checkpointed = ("_step", "_pairs")

    def __init__(
        self,
        buckets: Annotated[int, Buckets(), Alias("num_buckets")] = 32,
        *,
        rounds: Annotated[int, Count(), Alias("num_hashes")] = 1,
    ) -> None:
        self.buckets, self.rounds = buckets, rounds
        self._step = 0
        self._pairs = 0.0
        self._drawn: dict[tuple[int, int, str], Tensor] = {}

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._step, self._pairs, self._drawn = 0, 0.0, {}

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if session.trainer.global_step != self._step:
            self._step, self._drawn = session.trainer.global_step, {}

    def _rotations(self, width: int, like: Tensor) -> Tensor:
        training = self.session.trainer.training if self._session is not None else False
        step = self._step if training else -1
        at = step, width, str(like.device)
        if at not in self._drawn:
            g = rng.keyed_generator(self.seed, WHO, width, step)
            drawn = torch.randn(self.rounds, width, self.buckets // 2, generator=g, dtype=torch.float32)
            self._drawn[at] = drawn.to(like.device)
        return self._drawn[at]

    @override
    def attend(self, call: Call) -> Tensor:
        refuse_dropout(call, WHO)
        size, heads, length, width = call.query.shape
        if length != call.key.shape[-2]:
            raise CannotReplace(f"it has {length} queries and {call.key.shape[-2]} keys, so it is not self-attention")
        there, causal = visible_keys(call, WHO)
        if there is not None:
            there = there.expand(size, heads, length).flatten(0, 1)

        def compute(dtype: torch.dtype) -> Tensor:
            q, k, v = (t.to(dtype).flatten(0, 1) for t in (call.query, call.whole_key, call.whole_value))
            with torch.no_grad():
                rotations = self._rotations(width, q)
                of_queries, of_all = buckets_of(q, rotations), buckets_of(k, rotations)
            chunk = -(-length // self.buckets)
            chunks = num_chunks(length, length, self.buckets, chunk)
            self._pairs = self.rounds * chunks * chunk * min(2 * chunk, length)
            return hashed_attention(
                q,
                k,
                v,
                of_queries,
                of_all,
                scale=call.scale,
                causal=causal,
                there=there,
                chunk=chunk,
                buckets=self.buckets,
            ).unflatten(0, (size, heads))

        return in_full(call, compute)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "pairs": self._pairs}

    @override
    def summary(self) -> str:
        if not self._pairs:
            return "no step taken"
        return f"{self._calls} calls of attention per step in {self.buckets} buckets, {self.rounds} rounds"

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._drawn = {}
