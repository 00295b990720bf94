"""SeqMix: convex mixtures of two padded sequences' one-hot codes, inputs and targets alike (Guo, Kim & Rush 2020)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._needs.needs import WITHIN, Part, Reasons
from lightning_eff._core._targets.calls import Change, TargetCall
from lightning_eff._core.batches import num_samples, tensors
from lightning_eff._core.blocks import refuse_compiled_around
from lightning_eff._core.losses import loss_of
from lightning_eff._core.patches import hook_before
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number, too_few_epochs
from lightning_eff.data.augmentation._tokens import found_tokens
from lightning_eff.data.augmentation.mixing._convex import Convex
from lightning_eff.data.augmentation.mixing._hook import CHOOSERS, OutputHook, mixed_rows, standing_around

WHO = "SeqMix"
_MASK = re.compile("attention_mask")
_OWN = "the tokens that it hides and asks for are a sequence's own, and the other one's are lost"


def seq_mix(embedding: Tensor, ids: Tensor, partner: Tensor, share: Tensor) -> Tensor:
    """``(lambda X + (1 - lambda) X') E = lambda E(x) + (1 - lambda) E(x')``: (B, T, D).

    ``X`` are the one-hot codes of a sequence, (T, V), and ``X'`` those of the one that is mixed with it. This is what a run
    does to what an ``nn.Embedding`` returns, which never holds a code of V entries.

    Args:
        embedding: ``E``, (V, D).
        ids: ``x``, (B, T), of integers.
        partner: which sequence each is mixed with, (B,), of integers.
        share: ``lambda``, (B,) or (1,), in [0, 1].
    """
    return mixed_rows(embedding[ids], partner, share)


def made_of(ids: Tensor, tokens: Tensor) -> bool:
    """Whether ``ids`` are ``tokens`` (B, T), a run of their columns, or they behind a first one, as a decoder's inputs are.

    Entries of ``tokens`` below 0, ignored as labels, may have become anything.
    """
    if ids.ndim != 2 or tokens.ndim != 2 or len(ids) != len(tokens):
        return False
    length, whole = ids.shape[1], tokens.shape[1]

    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.numel() > 0 and bool(((a == b) | (b < 0)).all())

    starts = {0, 1, whole - length}
    within = any(same(ids, tokens[:, s : s + length]) for s in starts if 0 <= s <= whole - length)
    return within or (length > 1 and length <= whole + 1 and same(ids[:, 1:], tokens[:, : length - 1]))


def of_places(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an embedding that is called so goes by where its ids stand alone: others at their places change nothing."""
    if (
        not isinstance(module, nn.Embedding)
        or type(module).forward is nn.Embedding.forward
        or module.max_norm is not None
    ):
        return False
    ids = args[0] if args else kwargs["input"]
    others = (ids.clamp(min=0) + 1) % module.num_embeddings
    changed = module.forward(others, *args[1:], **kwargs) if args else module.forward(**{**kwargs, "input": others})
    return torch.equal(changed, module.forward(*args, **kwargs))


def joined(mask: Tensor, partner: Tensor) -> Tensor:
    """Which tokens either sequence of a mixture has: the larger entry of the two masks (B, T)."""
    return torch.maximum(mask, mask.index_select(0, partner.to(mask.device)))


def _pointless(profile: RunProfile) -> str | None:
    if not profile.visible_loss:
        return "the loss cannot be seen, so labels could not be mixed"
    if profile.sequence_length is None:
        return "samples are no sequences of tokens"
    return "a batch of one has nothing to mix" if profile.batch_size < 2 else too_few_epochs(profile)


class SeqMix(Convex):
    """Train on convex mixtures of two sequences of tokens, and of what they are to become.

    Each sequence of a micro-batch is mixed with another one of it (a random permutation says which), place by place, as padded:
    its one-hot codes become ``lambda X + (1 - lambda) X'``, with ``lambda ~ Beta(alpha, alpha)``. For a network that looks
    tokens up that is ``lambda E(x) + (1 - lambda) E(x')``: what the ``nn.Embedding`` of the tokens returns is mixed while the
    step runs, those of a decoder's inputs and of types of tokens with it, and those of places stay. The loss is
    ``lambda L(y) + (1 - lambda) L(y')``, which for cross-entropy is that on the mixed targets, exactly, in the same forward
    pass; each of the two losses is divided by its own labels that count.

    So language models, encoder-decoders and classifiers of texts go on to take ids and integer labels. Roles are swapped where
    ``lambda`` is below one half, which changes no distribution: ``training_step`` sees the ids and labels of the larger share.
    A metric that it computes of them is told once. An ``attention_mask`` (B, T) in the batch becomes that of either sequence's
    tokens; a mask that the module makes of ids by itself is that of the larger share, as is the place that a classifier reads.

    It cannot stand beside what chooses among a batch's samples, packs them, or hides tokens to ask for them. Where several
    techniques mix, each batch is mixed by one of them.

    It regularises: it costs hardly any time, makes training fit more slowly, and pays on few texts that are seen over and over.

    Logged: ``share``, the mean share of the other sequences in the last micro-batch, and ``milliseconds``, what it took of the
    host to draw it.

    Args:
        alpha: of the Beta distribution, >= 0: mixtures are strong at 1, and mostly weak at 0.1; 0 is plain training.
        prob: the chance of a micro-batch to be mixed, in [0, 1]; 0 is plain training.
        until: the share of the budget in [0, 1] from which on batches are left alone; 0 is plain training.
        per_sample: draw ``lambda`` for each sequence instead of once for the micro-batch.
        keys: names or positions of the tokens (B, T) in the batch; None takes ``input_ids``, or the only tensor (B, T) of
            integers that is not called a mask, a position, a type or a label.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end; at the first
            batch, before any weight has changed, if it holds no tokens, if no ``nn.Embedding`` is called on them, if labels are
            no classes, or if the step's loss on labels cannot be seen.

    Sources:
        Guo et al. 2020, Sequence-level Mixed Sample Data Augmentation, arXiv:2011.09039.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of training on few texts"
    paper: ClassVar[str] = "Guo et al. 2020, arXiv:2011.09039"
    constraints: ClassVar[str] = (
        "automatic optimization; tokens (B, T) of integers, looked up by an nn.Embedding; labels that are classes; a loss of"
        " torch.nn.functional"
    )
    refuses: ClassVar[Reasons] = {
        Part.TENSOR: "the technique mixes what embeddings return, which may be split",
        **WITHIN,
    }
    survey: ClassVar[Survey | None] = Survey("data augmentation (SeqMix)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"alpha": Choice((0.1, 0.5, 1.0)), "until": Choice((0.8, 1.0))}, _pointless
    )
    control: ClassVar[Control] = Control("no augmentation: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {
        **CHOOSERS,
        **dict.fromkeys(("MaskRateSchedule", "SpanMasking"), _OWN),
        "SequencePacking": "sequences that share a row are at other places than those that they are mixed with",
        "SAF": "a mixture's scores would be held to those of another mixture some epochs before",
    }

    def __init__(
        self,
        alpha: float = 0.1,
        *,
        prob: float = 1.0,
        until: float = 1.0,
        per_sample: bool = False,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        check_number(
            alpha, who=WHO, name="alpha", low=0, high=float("inf"), what="of Beta(alpha, alpha); 0 is plain training"
        )
        super().__init__(prob=prob, until=until, keys=keys, labels=labels)
        self.alpha = alpha
        self.per_sample = per_sample

    @override
    def _reset(self) -> None:
        super()._reset()
        self._embeddings: dict[str, nn.Embedding] = {}
        self._count = 1  # of the batch's tensors of tokens
        self._drawn: tuple[Tensor, Tensor] | None = None  # partners and shares of the batch that is mixed

    @override
    def detach(self, session: Session) -> None:
        self._drawn, self._embeddings = None, {}

    # -- what looks the tokens up

    @override
    def inputs(self, batch: Any, labels: dict[str, Tensor]) -> list[Tensor]:
        """The tokens, and the masks that say where they are."""
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
        """Which embeddings look up the batch's tokens, and what else of it there is for each place."""
        every = {path: m for path, m in step.module.named_modules() if isinstance(m, nn.Embedding)}
        called: dict[str, list[Tensor]] = {path: [] for path in every}
        places: set[str] = set()

        def noting(path: str) -> Any:
            def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                ids = args[0] if args else kwargs.get("input")
                if isinstance(ids, Tensor):
                    called[path].append(ids.detach())
                    if of_places(module, args, kwargs):
                        places.add(path)

            return note

        handles = [hook_before(m, noting(path), with_kwargs=True) for path, m in every.items()]
        try:
            step.forward_only(batch, num_samples(batch), transform=False)
        finally:
            for handle in handles:
                handle.remove()
        whole = [t for _, t in tensors(batch) if not t.is_floating_point() and t.ndim == 2 and t.dtype != torch.bool]
        tokens = [t for _, t in found_tokens(batch, self.keys, who=WHO)]

        def looking_up(some: Sequence[Tensor]) -> list[str]:
            known = {path: calls for path, calls in called.items() if path not in places}
            return [path for path, calls in known.items() if any(made_of(ids, t) for ids in calls for t in some)]

        mine = looking_up(tokens)
        if not mine:
            shapes = [f"{path} {tuple(ids.shape)}" for path, calls in called.items() for ids in calls]
            raise ValueError(
                f"{WHO}: no nn.Embedding was called on the tokens {tuple(tokens[0].shape)} of the batch (called were:"
                f" {', '.join(shapes) or 'none'}); expected one on ids (B, T), whose output is mixed. Name other tokens by"
                " keys=, or take the technique out."
            )
        weights = {id(every[path].weight) for path in mine}
        tied = [path for path, m in every.items() if called[path] and id(m.weight) in weights]
        self._embeddings = {path: every[path] for path in dict.fromkeys([*mine, *tied, *looking_up(whole)])}
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
        """``proceed(batch)`` with what embeddings return mixed as was drawn."""
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
                f"{WHO}: none of the embeddings {', '.join(self._embeddings)} was called in a step; expected the tokens to be"
                " looked up by them, as in the first batch. Let every step look up its tokens alike, or take the technique out."
            )
        return output
