"""DOTA: attention to the strongest pairs, as a low-rank detector that is trained along sees them (Qu et al. 2022, ASPLOS)."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.record import swap_of
from lightning_eff._core._architecture.technique import Architecture
from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._attention.calls import Call
from lightning_eff._core._attention.inside import Inside, Place, put_inside
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core.losses import loss_of
from lightning_eff._core.patches import Patches
from lightning_eff._core.search_space import Choice, SearchSpace, needs_attention
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff.model.attention._replacing.inside import InsideAttention
from lightning_eff.model.attention._replacing.selecting import SLOWER
from lightning_eff.model.attention._replacing.technique import CONFLICTS, NO_PAIRS, SOME_KEYS

WHO = "DOTAAttention"
QUERY, KEY, PROJECTION = "dota_query", "dota_key", "dota_projection"


def sparse_projection(width: int, rank: int) -> Tensor:
    """Return P, (width, rank): entries ``sqrt(3 / rank)`` times 1, 0 or -1, with probabilities 1/6, 2/3 and 1/6
    (Achlioptas 2003).
    """
    drawn = torch.rand(width, rank, dtype=torch.float32)
    signs = (drawn < 1 / 6).to(drawn.dtype) - (drawn >= 5 / 6).to(drawn.dtype)
    return math.sqrt(3 / rank) * signs


def strongest(scores: Tensor, share: float) -> Tensor:
    """Return, as bool, the largest ``ceil(share n)`` scores of each row, where n is the number of its scores above
    ``-inf``.

    Args:
        scores: (.., L, S).
        share: in (0, 1].
    """
    counts = ((scores > -torch.inf).sum(-1, keepdim=True) * share).ceil()
    place = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (place < counts) & (scores > -torch.inf)


class Detecting(Inside):
    """Attention to the pairs that a detector finds strongest."""

    share: float
    collected: list[tuple[Tensor, bool]] | None

    def detected(self, call: Call) -> Tensor:
        """Return ``S~ = (Q P W_q) (K P W_k)^T scale`` with the mask, (B, H, L, S)."""
        p = cast(Tensor, self._buffers[PROJECTION]).to(call.query.dtype)
        w_q, w_k = (cast(Tensor, self._parameters[name]).to(p.dtype) for name in (QUERY, KEY))
        q, k = call.query @ p @ w_q, call.key @ p @ w_k
        return call.scores_of(q, k.repeat_interleave(call.groups, dim=1))

    @override
    def attends(self, call: Call) -> Tensor:
        found = self.detected(call)
        collected = self.__dict__.get("collected")
        if collected is not None and torch.is_grad_enabled():
            exact = call.scores()
            there = (exact > -torch.inf).expand(found.shape)
            error = (exact - found).masked_fill(~there, 0.0).float()
            trains = any(cast(Tensor, self._parameters[name]).requires_grad for name in (QUERY, KEY))
            mean = error.square().sum() / there.sum()
            if torch._C._current_graph_task_id() < 0:  # a recomputation in the backward pass was already counted
                collected.append((mean, trains))
        return call.of_keys(strongest(found.detach(), self.share)).run()

    @override
    @torch.no_grad()
    def begin(self) -> None:
        """Draw the projection and set the detector's matrices to the identity, so scores are right on average over draws."""
        p = cast(Tensor, self._buffers[PROJECTION])
        p.copy_(sparse_projection(*p.shape))
        for name in (QUERY, KEY):
            maps = cast(Tensor, self._parameters[name])
            maps.copy_(torch.eye(maps.shape[-1]).expand_as(maps))


class DOTAAttention(InsideAttention):
    """Let each query attend only to a fraction of its keys, those that a small detector, trained along, finds strongest.

    The detector of a layer computes ``S~ = (Q P W_q) (K P W_k)^T / sqrt(d)`` for each head, with a sparse random
    projection P of the head's features to ``rank`` numbers and learnt matrices W (rank, rank). Of the n visible keys of
    a query, the ``ceil(share n)`` with the largest scores are kept. Attention on these is exact, and its weights sum to
    one again. ``weight`` times the mean square of ``S - S~`` over pairs, averaged over layers, is added to the loss. It
    trains the detector and, as in the paper, pulls the scores S towards what the detector can see. Masks, causal
    attention, grouped queries and dropout of weights are supported.

    **It saves nothing on a CPU or GPU**. The detector looks at all pairs, and attention runs on all of them with a
    mask, which costs more than the fused kernel without one. In training, the loss also needs the exact scores of all
    pairs. The paper's speed-up of 152.6 comes from its own chip. Use it to study sparse attention. The module has a
    detector afterwards: its checkpoints load only into ``lightning_eff.apply(plain, DOTAAttention(...))``, and
    ``lightning_eff.export`` refuses it.

    Two things differ from the paper. The detector reads a head's queries and keys instead of the layer's input, which a
    call of attention does not show. It computes in the module's own precision instead of 4 bits.

    Logged: ``attentions``, the number of attention modules; ``error``, the mean square in the loss of the last step.

    Args:
        share: the fraction of keys that each query keeps. The paper goes down to 0.1 and less in fine-tuning. 1 is
            plain training.
        rank: the number of features per head that the detector uses.
        weight: the weight of the detector's error in the loss. At 0 the detector is not trained.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if no attention is found. At the first batch, if
            attention was not seen in the training step.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[DOTAAttention(share=0.25)])

    References:
        Qu et al. 2022, "DOTA: Detect and Omit Weak Attentions for Scalable Transformer Acceleration", ASPLOS,
        doi:10.1145/3503222.3507738.
    """

    saves = "attention products on hardware that skips single pairs; costs time elsewhere"
    paper = "Qu et al. 2022, doi:10.1145/3503222.3507738"
    constraints = (
        "attention by scaled_dot_product_attention or nn.MultiheadAttention, not compiled; no faster on a CPU or GPU; a single"
        " device or DDP"
    )
    search_space = SearchSpace({"share": Choice((0.1, 0.25, 0.5))}, needs_attention)
    control = SLOWER
    conflicts: ClassVar[Mapping[str, str]] = {
        **CONFLICTS,
        **SOME_KEYS,
        **dict.fromkeys(("Performer", "Linformer", "Fastformer"), NO_PAIRS),
    }
    stays = "attention to all keys computes something else"
    refuses: ClassVar[Reasons] = {**Architecture.refuses, Part.SHARD: ""}
    needs_automatic_optimization: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"share": 1.0}

    def __init__(
        self,
        share: Annotated[float, Fraction(above=0)] = 0.25,
        *,
        rank: Annotated[int, Count()] = 8,
        weight: Annotated[float, Number(at_least=0)] = 0.1,
    ) -> None:
        self.share, self.rank, self.weight = share, rank, weight
        self._error: Tensor | float = 0.0
        self._count = 0

    # -- the change

    @override
    def build(self, plain: nn.Module, place: Place) -> Inside:
        made = cast(Detecting, put_inside(Detecting, plain, who=WHO, share=self.share))
        made.register_buffer(PROJECTION, torch.empty(place.width, self.rank))
        for name, heads in ((QUERY, place.heads), (KEY, place.call.key.shape[1])):
            made.register_parameter(name, nn.Parameter(torch.empty(heads, self.rank, self.rank)))
        made.begin()
        return made

    # -- the detector's loss

    @override
    def attach(self, session: Session) -> None:
        self._error, self._count = 0.0, 0
        session.chain.add(Stage.REWEIGHT, self._link)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if not torch.is_grad_enabled():
            return proceed(batch)
        detecting = [m for m in step.module.modules() if isinstance(m, Detecting) and swap_of(m)]
        collected: list[tuple[Tensor, bool]] = []
        patches = Patches()
        for m in detecting:
            patches.set(m, "collected", collected)
        # until the backward pass is over, because gradient checkpointing must recompute the same
        self.session.when_step_ends(patches.restore)
        output = proceed(batch)
        errors = [error for error, _ in collected]
        self._count = len(detecting)
        loss = loss_of(output)
        if loss is None or not errors:
            return output
        error = torch.stack(errors).mean()
        self._error = error.detach()
        if self.weight and any(trains and not e.requires_grad for e, trains in collected):
            raise ValueError(
                f"{WHO}: attention runs where no graph is recorded, such as in checkpoints with use_reentrant=True, so the"
                " detector would not be trained. Use use_reentrant=False, or weight=0.0."
            )
        whole = loss + self.weight * error.to(loss.dtype)
        return {**output, "loss": whole} if isinstance(output, Mapping) else whole

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"attentions": self._count, "error": self._error}

    @override
    def summary(self) -> str:
        if not self._count:
            return "no step taken"
        return f"{self._count} attention modules kept {self.share:.0%} of their keys; detector error {float(self._error):.3g}"

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_error": float(self._error)}
