"""ELSA: keys whose angle to the query, estimated from signs of random projections, is small (Ham et al. 2021, ISCA)."""

import math
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._attention.calls import Call
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core.search_space import SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.attention._replacing.projections import orthogonal_rows
from lightning_eff.model.attention._replacing.selecting import SLOWER, SelectedKeys, with_best
from lightning_eff.model.attention._replacing.technique import no_sequences

WHO = "ELSAAttention"


def sign_hash(x: Tensor, projections: Tensor) -> Tensor:
    """``h(x) = sign(R x)`` as 1 and -1: (.., bits).

    Args:
        x: (.., E).
        projections: R, (bits, E).
    """
    return 2.0 * (x @ projections.to(x.dtype).T >= 0).to(x.dtype) - 1.0


def estimated_angles(hq: Tensor, hk: Tensor, correction: float) -> Tensor:
    """``max(0, pi / bits hamming(h(q), h(k)) - correction)`` in radians, (.., L, S)."""
    bits = hq.shape[-1]
    hamming = (bits - hq @ hk.transpose(-1, -2)) / 2
    return (math.pi / bits * hamming - correction).clamp_min(0.0)


def longest_seen(k: Tensor, seen: Tensor | None) -> Tensor:
    """``max |k|`` over the keys that each query may see: (.., L or 1, 1).

    Args:
        k: (.., S, E).
        seen: broadcasts to (.., L, S), bool; None where every query may see all keys.
    """
    lengths = k.norm(dim=-1)[..., None, :]
    if seen is not None:
        lengths = lengths.masked_fill(~seen, 0.0)
    return lengths.amax(-1, keepdim=True)


def threshold_of(q: Tensor, k: Tensor, scores: Tensor, p: float) -> Tensor:
    """t: the mean over queries of the least ``q k / (|q| max|k|)`` among keys with a weight above p / n.

    Queries whose own token is hidden from all queries are padding, and are left out.

    Args:
        q: (.., L, E).
        k: (.., S, E).
        scores: of attention, ``-inf`` where a key may not be seen, (.., L, S).
        p: how much is approximated; n is the number of keys that a query may see.
    """
    seen = scores > -torch.inf
    matters = scores.softmax(-1) > p / seen.sum(-1, keepdim=True).clamp_min(1)
    similar = q @ k.transpose(-1, -2) / (q.norm(dim=-1, keepdim=True) * longest_seen(k, seen)).clamp_min(1e-12)
    least = similar.masked_fill(~(matters & seen), math.inf).amin(-1)
    if q.shape[-2] == k.shape[-2]:
        least = least.masked_fill(~seen.any(-2), math.inf)
    return least[least < math.inf].mean()


class ELSAAttention(SelectedKeys):
    """Let each query see the keys alone whose similarity, estimated from hashes of a few bits, exceeds a threshold.

    A hash is the signs of ``bits`` orthogonal projections, drawn once of the run's seed. The number of bits in which
    the hashes of a query and a key differ estimates their angle, less ``correction``, so that the estimate is rather
    too small. A key is kept if cos(angle) times its length exceeds ``t`` times the length of the longest key that the
    query may see. The paper takes the longest of all keys, so that under causal attention later tokens would change
    earlier outputs. The threshold t is learnt in one pass over the first batch: the mean over queries of the least
    similarity among keys whose attention weight is above ``p / n``. There is one threshold for all layers, where the
    paper has one for each, and it stays as it is learnt. In a module that trains from scratch, attention is near
    uniform then. What runs before that batch, such as Lightning's sanity check, is plain. So is an evaluation without a
    learnt threshold, which warns. Attention over the chosen
    pairs is exact and its weights sum to one. The choice has no gradient. A query without such a key sees the key
    that is estimated nearest. Masks, causal attention, grouped queries and dropout are supported.

    **It saves nothing on a CPU or GPU**: hashes are compared for all pairs, and attention runs on all of them with a mask,
    which costs more than the fused kernel without one. The paper's 58 times are its own chip's, which infers. It acts in
    evaluation of a Trainer that has it, and nowhere else.

    Logged: ``attentions``, calls in the last step; ``kept``, the share of the pairs that could be seen; ``threshold``, t.

    Args:
        p: how much is approximated, >= 0; 1 leaves out about what has less than the mean weight; 0 leaves all in, which is
            plain training.
        bits: of a hash, >= 1.
        correction: radians that an angle is taken to be smaller, in [0, pi]; the paper has .127 for 64 bits of heads of 64.

    Raises:
        ValueError: for other values; at the first batch, before any weight has changed, where no attention is seen, or one
            cannot be replaced, with the reason; at setup for compiled modules.

    Sources:
        Ham et al. 2021, "ELSA: Hardware-Software Co-design for Efficient, Lightweight Self-Attention Mechanism in Neural
        Networks", ISCA, doi:10.1109/ISCA52012.2021.00060.
    """

    saves: ClassVar[str] = "products of attention on hardware that passes over pairs one by one; costs time elsewhere"
    paper: ClassVar[str] = "Ham et al. 2021, doi:10.1109/ISCA52012.2021.00060"
    constraints: ClassVar[str] = (
        "attention by scaled_dot_product_attention or nn.MultiheadAttention, not compiled; no faster on a CPU or GPU"
    )
    refuses: ClassVar[Reasons] = {Part.PIPELINE: "the technique learns its thresholds from whole batches"}
    survey: ClassVar[Survey | None] = Survey("sparse attention in hardware (ELSA)", zhuang="4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"p": Uniform(0.5, 4.0, log=True)}, no_sequences)
    control: ClassVar[Control] = SLOWER

    def __init__(self, p: float = 1.0, *, bits: int = 64, correction: float = 0.127) -> None:
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0.0 <= p < math.inf:
            raise ValueError(f"{WHO}({p=}): expected a number >= 0, in mean attention weights; 0 is plain training.")
        if isinstance(bits, bool) or not isinstance(bits, int) or bits < 1:
            raise ValueError(f"{WHO}({bits=}): expected an integer >= 1, such as 64.")
        if isinstance(correction, bool) or not isinstance(correction, int | float) or not 0.0 <= correction <= math.pi:
            raise ValueError(f"{WHO}({correction=}): expected radians in [0, pi], such as 0.127.")
        self.p, self.bits, self.correction = float(p), bits, float(correction)
        self._threshold: float | None = None
        self._found: list[float] = []
        self._projections: dict[tuple[int, str], Tensor] = {}
        self._warned = False

    @property
    @override
    def neutral(self) -> bool:
        return self.p == 0.0

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
                f"{WHO}: it has learnt no threshold, so this evaluation computes plain attention. Give the checkpoint of a"
                " fit with it, ckpt_path=..., or evaluate with the Trainer that trained."
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
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "threshold": self._threshold}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._threshold, self._projections = state_dict["threshold"], {}
