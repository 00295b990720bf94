"""Reformer's attention: each query sees the keys of its bucket of a locality-sensitive hash (Kitaev et al. 2020).

The rule stands in ``_replacing.hashing``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._attention.calls import Call, CannotReplace, keys_alone
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.attention._replacing.hashing import buckets_of, hashed_attention, num_chunks
from lightning_eff.model.attention._replacing.technique import NO_DROPOUT, OUTSIDE, ReplacedAttention, no_sequences

WHO = "Reformer"
_NO_PAIRS = "it has no weight for each pair that the other's mask or choice could be applied to"


def _pointless(profile: RunProfile) -> str | None:
    if (why := no_sequences(profile)) is not None:
        return why
    if profile.sequence_length is not None and profile.sequence_length < 512:
        return f"in sequences of {profile.sequence_length} tokens exact attention is faster"
    return None


class Reformer(ReplacedAttention):
    """Let each query see only the keys that hash to its bucket, in windows of bounded size.

    A hash is ``argmax [x R; -x R]`` of the direction of a query or key, with a random R (E, buckets / 2). R is drawn
    anew in each optimizer step of training, and once for evaluation. Queries that share a bucket are put into chunks
    of ``L / buckets``, and each chunk sees a window of twice as many keys of the bucket around its own place. A pair
    that meets in several rounds of hashing counts once. A query that meets no key sees the key of its own place.
    Attention over the pairs that meet is exact, and with one bucket it is ordinary attention. Causal attention, masks
    that hide padding, and grouped queries are supported.

    Differences from the paper: (1) The paper uses the queries as keys, normalised, so that similar tokens meet. An
    unchanged module has keys of its own, so queries and keys meet here if their directions are similar. (2) The paper
    sorts all tokens together, so under causal attention later tokens decide which earlier keys a query sees. Here a
    window follows from the keys that the query may see, so later tokens and padding never change an output. (3) A
    token may see itself. (4) The reversible layers are not included.

    **Where it pays.** A round computes about ``6 L^2 / buckets`` pairs. Sorting and gathering cost more than this
    saves below about 8,000 tokens, where fused exact attention is faster on a GPU. It changes the model, so train
    with it from the start or fine-tune with it. It adds no parameter, and acts in evaluation only under a Trainer
    that has it.

    Logged: ``attentions``, calls in the last step; ``pairs``, of how many pairs of L^2 in each round weights are computed.

    Args:
        buckets: an even number >= 2, or 1, which is exact attention; 0 is plain training.
        rounds: of hashing, >= 1.

    Raises:
        ValueError: for other values; at the first batch, before any weight has changed, where no attention is seen, or one
            cannot be replaced, with the reason: dropout of weights, a mask that says more than what is padding and whether
            it is causal, other keys than queries; at setup for compiled modules. A later batch with such a mask is an error
            too.

    Sources:
        Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451.
    """

    saves: ClassVar[str] = "the square of the length in attention, above some 8,000 tokens, for another model"
    paper: ClassVar[str] = "Kitaev et al. 2020, arXiv:2001.04451"
    constraints: ClassVar[str] = (
        "self-attention by scaled_dot_product_attention or nn.MultiheadAttention, without dropout of weights, not compiled;"
        " pays for thousands of tokens"
    )
    survey: ClassVar[Survey | None] = Survey("attention by hashing (Reformer)", zhuang="4", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"buckets": Choice((8, 32)), "rounds": Choice((1, 4))}, _pointless
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, with fused exact attention"
    )
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
            _NO_PAIRS,
        ),
    }

    def __init__(self, buckets: int = 32, *, rounds: int = 1) -> None:
        even = isinstance(buckets, int) and not isinstance(buckets, bool) and (buckets in (0, 1) or buckets % 2 == 0)
        if not even or buckets < 0:
            raise ValueError(
                f"{WHO}({buckets=}): expected an even integer >= 2, 1 for exact attention, or 0 for plain training."
            )
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise ValueError(f"{WHO}({rounds=}): expected an integer >= 1.")
        self.buckets, self.rounds = buckets, rounds
        self._step = 0
        self._pairs = 0.0
        self._drawn: dict[tuple[int, int, str], Tensor] = {}

    @property
    @override
    def neutral(self) -> bool:
        return self.buckets == 0

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
        if call.dropout:
            raise CannotReplace(NO_DROPOUT.format(call.dropout, WHO))
        size, heads, length, width = call.query.shape
        if length != call.key.shape[-2]:
            raise CannotReplace(f"it is on {length} queries and {call.key.shape[-2]} keys, and not on its own tokens")
        of_keys, causal = keys_alone(call, WHO)
        there = None
        if of_keys is not None:
            there = of_keys if of_keys.dtype == torch.bool else of_keys > torch.finfo(of_keys.dtype).min / 2
            if of_keys.dtype != torch.bool and bool((of_keys.masked_fill(~there, 0) != 0).any()):
                raise CannotReplace("its mask adds numbers to the scores of keys")
            there = there.expand(size, heads, length).flatten(0, 1)
        kind = call.query.device.type
        with torch.autocast(kind, enabled=False):
            dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
            q, k, v = (t.to(dtype).flatten(0, 1) for t in (call.query, call.whole_key, call.whole_value))
            with torch.no_grad():
                rotations = self._rotations(width, q)
                of_queries, of_all = buckets_of(q, rotations), buckets_of(k, rotations)
            chunk = -(-length // self.buckets)
            chunks = num_chunks(length, length, self.buckets, chunk)
            self._pairs = self.rounds * chunks * chunk * min(2 * chunk, length)
            out = hashed_attention(
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
        kept = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else call.value.dtype
        return out.to(kept)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "pairs": self._pairs}

    @override
    def summary(self) -> str:
        if not self._pairs:
            return "no step taken"
        return f"{self._calls} calls of attention a step in {self.buckets} buckets, {self.rounds} rounds"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "step": self._step, "pairs": self._pairs}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._step, self._pairs, self._drawn = state_dict["step"], state_dict["pairs"], {}
