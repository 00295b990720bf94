"""SeqMix: convex combinations of the one-hot codes of two sequences, inputs and targets (Guo, Kim & Rush 2020)."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._needs.needs import WITHIN, Part, Reasons
from lightning_eff._core._targets.calls import Change, TargetCall
from lightning_eff._core.batches import tensors
from lightning_eff._core.blocks import refuse_compiled_around
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff.data.augmentation._arguments import AlphaOrZero, Keys, Probability, Until, no_text
from lightning_eff.data.augmentation._lookups import lookups
from lightning_eff.data.augmentation._tokens import found_tokens
from lightning_eff.data.augmentation.mixing._convex import Convex
from lightning_eff.data.augmentation.mixing._hook import CHOOSERS, OutputHook, mixed_rows, standing_around

WHO = "SeqMix"
_MASK = re.compile("attention_mask")
_OWN = "it hides tokens of one sequence only, and those of the other sequence would be lost"


def joined(mask: Tensor, partner: Tensor) -> Tensor:
    """Return the union of the attention masks (B, T) of both sequences of each mixture."""
    return torch.maximum(mask, mask.index_select(0, partner.to(mask.device)))


def _pointless(profile: RunProfile) -> str | None:
    if not profile.visible_loss:
        return "the loss is not visible, so labels cannot be mixed"
    return "a batch of one sample has nothing to mix" if profile.batch_size < 2 else no_text(profile)


class SeqMix(Convex):
    """Mix the token embeddings of two sequences, and the losses on their labels.

    Each sequence of a micro-batch is mixed with another one, given by a random permutation, position by position and including
    padding. The one-hot codes become ``lambda X + (1 - lambda) X'`` with ``lambda ~ Beta(alpha, alpha)``. In the network this
    is ``lambda E(x) + (1 - lambda) E(x')``: the outputs of the ``nn.Embedding`` of the tokens are mixed during the step. So are
    the embeddings of decoder inputs and of token types, but not those of positions. The loss is ``lambda L(y) + (1 - lambda)
    L(y')``, computed in the same forward pass. For cross-entropy this equals the loss on the mixed targets. Each of the two
    losses is averaged over its own labels that are not ignored.

    Use it for language models, encoder-decoders and text classifiers on few texts that are seen many times. It costs hardly any
    time, and the training loss falls more slowly.

    The batch still holds ids and integer labels, those of the sequence with the larger weight (``lambda`` is at least one half,
    which does not change the distribution of mixtures). Metrics that ``training_step`` computes from the labels are too low,
    and a warning says so. An ``attention_mask`` (B, T) in the batch becomes the union of both masks. A mask that the module
    computes from the ids is that of the larger weight, and so is the position that a classifier reads.

    It cannot be combined with techniques that choose samples, pack sequences or mask tokens as targets. If several techniques
    mix, they take turns, one per batch.

    It logs ``share``, the mean weight of the other sequences in the last micro-batch, and ``milliseconds``, the host time of
    the draws.

    Args:
        alpha: the parameter of the Beta distribution of the mixing weight. With 1 most mixtures are strong, with 0.1 most are
            weak. 0 is plain training.
        prob: the probability that a micro-batch is mixed. 0 is plain training.
        until: the fraction of the budget after which batches are left unchanged. 0 is plain training.
        per_sample: whether each sequence has its own ``lambda``. By default there is one per micro-batch.
        keys: the names or positions of the tokens (B, T) in the batch. None takes ``input_ids``, or the only integer tensor
            (B, T) whose name is not that of a mask, a position, a type or a label.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch,
            before any weight changes, if it holds no tokens, or if no ``nn.Embedding`` is called on them. Also if labels are no
            classes, or if no loss call on the labels is visible.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SeqMix(alpha=0.1)])

    References:
        Guo et al. 2020, "Sequence-Level Mixed Sample Data Augmentation", arXiv:2011.09039.
    """

    saves = "no time per step: it regularises, for a better model from few texts"
    paper = "Guo et al. 2020, arXiv:2011.09039"
    constraints = (
        "needs automatic optimization, integer tokens (B, T) that an nn.Embedding looks up, labels that are classes and a"
        " loss of torch.nn.functional"
    )
    refuses: ClassVar[Reasons] = {
        Part.TENSOR: "the technique mixes the outputs of embeddings, which may be split",
        **WITHIN,
    }
    search_space = SearchSpace({"alpha": Choice((0.1, 0.5, 1.0)), "until": Choice((0.8, 1.0))}, _pointless)
    conflicts: ClassVar[Mapping[str, str]] = {
        **CHOOSERS,
        **dict.fromkeys(("MaskRateSchedule", "SpanMasking"), _OWN),
        "SequencePacking": "sequences that share a row are at other positions than those that they are mixed with",
        **Convex.conflicts,
    }

    def __init__(
        self,
        alpha: AlphaOrZero = 0.1,
        *,
        prob: Probability = 1.0,
        until: Until = 1.0,
        per_sample: bool = False,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        super().__init__(alpha=alpha, prob=prob, until=until, per_sample=per_sample, keys=keys, labels=labels)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._embeddings: dict[str, nn.Embedding] = {}
        self._count = 1  # the number of token tensors in the batch
        self._drawn: tuple[Tensor, Tensor] | None = None  # partners and shares of the current batch

    @override
    def detach(self, session: Session) -> None:
        self._drawn, self._embeddings = None, {}

    # -- the embeddings of the tokens

    @override
    def inputs(self, batch: Any, labels: dict[str, Tensor]) -> list[Tensor]:
        """Return the tokens and their attention masks."""
        found = found_tokens(batch, self.keys, who=WHO)
        masks = [t for path, t in tensors(batch) if _MASK.search(path) and t.ndim == 2]
        self._count = len(found)
        return [t for _, t in found] + masks

    @property
    @override
    def mixes_inputs(self) -> bool:
        return False

    @override
    def entrances(self, module: nn.Module) -> list[nn.Module]:
        return [m for m in module.modules() if isinstance(m, nn.Embedding)]

    @override
    def look(self, step: Step, batch: Any) -> None:
        """Find the embeddings that are called on the batch's tokens or on other ids at the same positions."""
        calls = lookups(step, batch)
        whole = [t for _, t in tensors(batch) if not t.is_floating_point() and t.ndim == 2 and t.dtype != torch.bool]
        tokens = [t for _, t in found_tokens(batch, self.keys, who=WHO)]

        mine = calls.of(tokens)
        if not mine:
            raise calls.none(tokens[0], who=WHO)
        every = calls.embeddings
        weights = {id(every[path].weight) for path in mine}
        tied = [path for path, m in every.items() if calls.ids[path] and id(m.weight) in weights]
        self._embeddings = {path: every[path] for path in dict.fromkeys([*mine, *tied, *calls.of(whole)])}
        for path in self._embeddings:
            refuse_compiled_around(step.module, path, who=WHO)

    # -- the mixtures

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        share = self.shares(len(partner), generator)
        if bool((share < 1).any()):
            self._drawn = partner, share
            inputs = inputs[: self._count] + [joined(mask, partner) for mask in inputs[self._count :]]
        return inputs, share.expand(len(partner))

    @override
    def weighing(self, share: Tensor) -> Change:
        return TargetCall.plain if self._drawn is None else super().weighing(share)

    @override
    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._drawn = None
        return super()._link(step, batch, lambda given: self._mixed_within(step, given, proceed))

    def _mixed_within(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Return ``proceed(batch)`` with the outputs of the embeddings mixed."""
        if self._drawn is None:
            return proceed(batch)
        partner, share = self._drawn
        hooks = [
            OutputHook(m, lambda output: mixed_rows(output, partner, share, step.versions, who=WHO))
            for m in self._embeddings.values()
        ]
        output = standing_around(step, self.session, hooks, batch, proceed)
        if not any(hook.calls for hook in hooks) and loss_of(output) is not None:
            raise ValueError(
                f"{WHO}: none of the embeddings {', '.join(self._embeddings)} was called in this step, unlike in the first one."
                f" Let every step look up its tokens in the same embeddings, or remove {WHO}."
            )
        return output
