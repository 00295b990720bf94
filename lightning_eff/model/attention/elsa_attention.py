"""ELSA: attention to keys whose angle to the query, estimated from sign hashes, is small (Ham et al. 2021, ISCA)."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core._attention.calls import Call
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core.search_space import SearchSpace, Uniform, needs_attention
from lightning_eff._core.session import Session
from lightning_eff.model.attention._replacing.projections import orthogonal_rows
from lightning_eff.model.attention._replacing.selecting import SelectedKeys, with_best

WHO = "ELSAAttention"


def sign_hash(x: Tensor, projections: Tensor) -> Tensor:
    """Return ``h(x) = sign(R x)`` as 1 and -1: (.., bits).

    Args:
        x: (.., E).
        projections: R, (bits, E).
    """
    return 2.0 * (x @ projections.to(x.dtype).T >= 0).to(x.dtype) - 1.0


def estimated_angles(hq: Tensor, hk: Tensor, correction: float) -> Tensor:
    """Return ``max(0, pi / bits hamming(h(q), h(k)) - correction)`` in radians, (.., L, S)."""
    bits = hq.shape[-1]
    hamming = (bits - hq @ hk.transpose(-1, -2)) / 2
    return (math.pi / bits * hamming - correction).clamp_min(0.0)


def longest_seen(k: Tensor, seen: Tensor | None) -> Tensor:
    """Return ``max |k|`` over the keys that each query may see: (.., L or 1, 1).

    Args:
        k: (.., S, E).
        seen: broadcasts to (.., L, S), bool; None if every query may see all keys.
    """
    lengths = k.norm(dim=-1)[..., None, :]
    if seen is not None:
        lengths = lengths.masked_fill(~seen, 0.0)
    return lengths.amax(-1, keepdim=True)


def threshold_of(q: Tensor, k: Tensor, scores: Tensor, p: float) -> Tensor:
    """Return t: the mean over queries of the smallest ``q k / (|q| max|k|)`` among keys with a weight above p / n.

    Queries whose own token is hidden from all queries are padding and are left out.

    Args:
        q: (.., L, E).
        k: (.., S, E).
        scores: the attention scores, ``-inf`` where a key may not be seen, (.., L, S).
        p: the degree of approximation; n is the number of keys that a query may see.
    """
    seen = scores > -torch.inf
    matters = scores.softmax(-1) > p / seen.sum(-1, keepdim=True).clamp_min(1)
    similar = q @ k.transpose(-1, -2) / (q.norm(dim=-1, keepdim=True) * longest_seen(k, seen)).clamp_min(1e-12)
    least = similar.masked_fill(~(matters & seen), math.inf).amin(-1)
    if q.shape[-2] == k.shape[-2]:
        least = least.masked_fill(~seen.any(-2), math.inf)
    return least[least < math.inf].mean()


class ELSAAttention(SelectedKeys):
    """Let each query attend only to keys whose similarity, estimated from short sign hashes, exceeds a threshold.

    A hash consists of the signs of ``bits`` orthogonal projections, drawn once from the run's seed. The number of bits
    in which the hashes of a query and a key differ estimates their angle; ``correction`` is subtracted, so that the
    estimate is rather too small. A key is kept if cos(angle) times its length exceeds t times the length of the longest
    key that the query may see. (The paper takes the longest of all keys; under causal attention, later tokens would
    then change earlier outputs.)

    The threshold t is learnt in one pass over the first batch: it is the mean over queries of the smallest similarity
    among keys whose attention weight is above ``p / n``. There is one threshold for all layers, where the paper has one
    per layer, and it stays fixed. In a module that trains from scratch, attention is still close to uniform on that
    batch. Passes before it, such as Lightning's sanity check, are plain. An evaluation without a learnt threshold is
    plain too, and warns.

    Attention over the chosen pairs is exact, and its weights sum to one. The choice has no gradient. A query without
    such a key sees the key estimated as nearest. Masks, causal attention, grouped queries and dropout are supported.

    **It saves nothing on a CPU or GPU**. Hashes are compared for all pairs, and attention runs on all of them with a
    mask, which costs more than the fused kernel without one. The paper's speed-up of 58 comes from its own chip, for
    inference. Use it to study sparse attention. It acts in evaluation only under a Trainer that has it.

    Logged: ``attentions``, the calls in the last step; ``kept``, the fraction of visible pairs that were kept;
    ``threshold``, t.

    Args:
        p: the degree of approximation. 1 drops about the keys with less than the mean weight, and 0 keeps all, which is
            plain training.
        bits: the number of bits of a hash.
        correction: the angle in radians that is subtracted from the estimate. 0.127 is the paper's, for 64 bits and
            heads of 64.

    Raises:
        ValueError: for a value out of range. At setup, for compiled modules. At the first batch, before any weight has
            changed, if there is no attention or a call cannot be replaced.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ELSAAttention(p=1.0)])

    References:
        Ham et al. 2021, "ELSA: Hardware-Software Co-design for Efficient, Lightweight Self-Attention Mechanism in
        Neural Networks", ISCA, doi:10.1109/ISCA52012.2021.00060.
    """

    paper = "Ham et al. 2021, doi:10.1109/ISCA52012.2021.00060"
    refuses: ClassVar[Reasons] = {Part.PIPELINE: "the technique learns its thresholds from whole batches"}
    search_space = SearchSpace({"p": Uniform(0.5, 4.0, log=True)}, needs_attention)
    neutral_at: ClassVar[Mapping[str, Any]] = {"p": 0.0}
    checkpointed = ("_threshold",)

    def __init__(
        self,
        p: Annotated[float, Number(at_least=0)] = 1.0,
        *,
        bits: Annotated[int, Count()] = 64,
        correction: Annotated[float, Number(at_least=0, at_most=math.pi)] = 0.127,
    ) -> None:
        self.p, self.bits, self.correction = p, bits, correction
        self._threshold: float | None = None
        self._found: list[float] = []
        self._projections: dict[tuple[int, str], Tensor] = {}
        self._warned = False

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._threshold, self._found = None, []
        self._projections = {}

    @override
    def look_at(self, call: Call) -> None:
        found = threshold_of(call.query.float(), call.whole_key.float(), call.scores().float(), self.p)
        self._found.append(float(found))

    @override
    def looked(self, session: Session) -> None:
        mine = [t for t in self._found if math.isfinite(t)]
        every = [t for found in session.gather(mine) for t in found]
        self._threshold = sum(every) / max(len(every), 1)
        self._found = []

    def _projected(self, width: int, device: torch.device) -> Tensor:
        at = width, str(device)
        if at not in self._projections:
            drawn = orthogonal_rows(self.bits, width, rng.keyed_generator(self.seed, WHO, width))
            self._projections[at] = drawn.to(device)
        return self._projections[at]

    @override
    def attend(self, call: Call) -> Tensor:
        if self._threshold is not None:
            return super().attend(call)
        if not self.session.fitting and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{WHO}: no threshold is learnt yet, so this evaluation computes plain attention. Give the checkpoint of a fit"
                f" with {WHO} as ckpt_path, or evaluate with the Trainer that trained."
            )
        return call.run()

    @override
    def keep(self, call: Call) -> Tensor:
        assert self._threshold is not None
        q, k = call.query.float(), call.whole_key.float()
        r = self._projected(q.shape[-1], q.device)
        with torch.autocast(q.device.type, enabled=False):
            angles = estimated_angles(sign_hash(q, r), sign_hash(k, r), self.correction)
            similar = angles.cos() * k.norm(dim=-1)[..., None, :]
        seen = call.may_see()
        return with_best(similar > self._threshold * longest_seen(k, seen), similar, seen)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return super().report() if self._threshold is None else {**super().report(), "threshold": self._threshold}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._projections = {}
