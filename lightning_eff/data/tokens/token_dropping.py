"""Token dropping: middle blocks compute the tokens that the model still predicts poorly (Hou et al. 2022)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._arguments.batch import BatchKeys
from lightning_eff._core._arguments.kinds import Count, Fraction, Layers
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core._targets.calls import TargetCall
from lightning_eff._core._targets.window import Targets
from lightning_eff._core._tokens.inputs import Kept
from lightning_eff._core._tokens.window import At, Tokens
from lightning_eff._core.batches import tensors
from lightning_eff._core.patches import hook_before
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._texts.arguments import SpecialTokens
from lightning_eff.data.tokens._texts.batches import SPECIAL, named_by_configs

WHO = "TokenDropping"
FIRST_IMPORTANCE = 10.0  #: of an id without a loss so far, above typical losses, so that such tokens are kept


def updated(importance: Tensor, losses: Tensor, counts: Tensor, *, beta: float) -> Tensor:
    """Return ``m_v = beta m_v + (1 - beta) l_v`` for each id v that was a target, with ``l_v`` the mean of its losses.

    Args:
        importance: m, (V,).
        losses: the sum of the losses of each id, (V,).
        counts: the number of losses of each id, (V,). Where it is 0, m stays.
        beta: the decay, in [0, 1).
    """
    return torch.where(counts > 0, beta * importance + (1 - beta) * losses / counts.clamp(min=1), importance)


def chosen(importance: Tensor, special: Tensor, padding: Tensor, count: int) -> Tensor:
    """Return the places of the ``count`` most important tokens of each sample, (B, k), k >= ``count``.

    Special tokens come first, so k is larger if a sample has more of them. Padding comes last. Ties go to the first.

    Args:
        importance: the importance of each token, (B, T).
        special: the tokens that are always kept, (B, T).
        padding: the tokens that are dropped first, (B, T).
        count: the number of tokens.
    """
    ranked = importance.masked_fill(padding, -torch.inf).masked_fill(special, torch.inf)
    count = max(count, int(special.sum(dim=1).max()))
    return ranked.argsort(dim=1, descending=True, stable=True)[:, :count]


def _pointless(profile: RunProfile) -> str | None:
    if profile.num_blocks < 3:
        return "found no stack of three or more blocks"
    if profile.sequence_length is None:
        return "samples are not sequences"
    return None if profile.visible_loss else "the losses of tokens cannot be seen"


class TokenDropping(Technique):
    """Train the middle blocks of a language model only on the tokens that it predicts worst.

    The technique keeps a running mean of the prediction loss of each id in the vocabulary. Ids that the model predicts well
    become unimportant. The blocks from the middle on, up to the last ``full_last``, compute the fraction ``keep`` of the
    tokens with the most important ids. The other tokens bypass these blocks unchanged and return at the last block. (In the
    authors' code, the first of these blocks still attends to all tokens.) ``special_ids`` are always kept. Padding is dropped
    first: ``padding_ids``, and places where the batch's ``attention_mask`` is 0. Masks, positions and rotary tables are
    selected with the tokens.

    Use it to pretrain masked language models; the paper trains BERT and saves a quarter of the compute. Be careful with causal
    models: the ids of the whole sequence decide which tokens are dropped, so later tokens affect earlier ones in training.
    Validation, test and prediction always see all tokens.

    The losses come from the step's own loss calls on the vocabulary. If a technique runs a step twice, the first pass counts.
    Ranks sum their losses, so all have the same means, which checkpoints store. Each id begins at 10, above typical losses, so
    ids that were never predicted are kept, as in the authors' code. Under :class:`ProgressiveStacking`, the middle is that of
    the blocks that run.

    It logs ``kept``, the tokens per sample that a middle block computed in the last step, ``share``, their fraction, and
    ``importance``, the mean of the running losses.

    Args:
        keep: the fraction of the tokens that middle blocks compute. 1 is plain training.
        beta: the decay of the running mean each time an id is seen again.
        special_ids: the ids of tokens that are always kept, such as BERT's [100, 101, 102, 103] (with ``[MASK]``). None takes
            the special tokens in the ``config`` of a Hugging Face model.
        padding_ids: the ids of tokens that are dropped first. None takes the ``config``'s ``pad_token_id``.
        full_first: the number of blocks at the front that compute all tokens. None is one less than half of the blocks, at
            least 1.
        full_last: the number of blocks at the end that compute all tokens.
        labels: the names or positions of the labels in the batch. Needed if several of its tensors are targets.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup, if there is no stack of blocks, or no middle block. At the first
            batch, before any weight changes, if no embedding is called on the ids of the blocks' tokens, no loss on the
            vocabulary is seen, or a block cannot work on fewer tokens. During training, if a step runs several texts through
            checkpointed blocks.

    Example:
        >>> trainer = L.Trainer(max_steps=10_000, callbacks=[TokenDropping(0.5, special_ids=[100, 101, 102, 103])])

    References:
        Hou et al. 2022, "Token Dropping for Efficient BERT Pretraining", arXiv:2203.13240.
    """

    saves = "compute and activations of the tokens that middle blocks skip, a quarter for BERT"
    paper = "Hou et al. 2022, arXiv:2203.13240"
    constraints = (
        "needs a language model with an nn.Embedding of its ids, a loss on the vocabulary by torch.nn.functional, and three"
        " or more blocks that do not depend on token positions; automatic optimization"
    )
    search_space = SearchSpace({"keep": Uniform(0.25, 0.75), "beta": Choice((0.95, 0.995))}, _pointless)
    control = Control(
        "the baseline for the same time with a learning rate that decays to zero; and RandomLTD, which chooses at random"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "RandomLTD": "both choose the tokens that middle blocks compute",
        "PatchDropout": "both choose the tokens that blocks compute",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"keep": 1.0}

    def __init__(
        self,
        keep: Annotated[float, Fraction(above=0)] = 0.5,
        *,
        beta: Annotated[float, Fraction(below=1)] = 0.995,
        special_ids: SpecialTokens | None = None,
        padding_ids: SpecialTokens | None = None,
        full_first: Annotated[int, Count(at_least=0)] | None = None,
        full_last: Annotated[int, Count(at_least=0)] = 1,
        labels: Annotated[list[str | int], BatchKeys(hint="Write a list, such as ['labels'].")] | None = None,
        layers: Layers | None = None,
    ) -> None:
        self.keep = keep
        self.beta = beta
        self.special_ids = special_ids
        self.padding_ids = padding_ids
        self.full_first = full_first
        self.full_last = full_last
        self.labels = labels
        self.layers = layers

    def _reset(self) -> None:
        self.importance: Tensor | None = None  # m, (V,); None before the first batch
        self._kept, self._full = 0, 0  # in the last step
        self._embedding: nn.Module | None = None
        self._called: dict[nn.Module, Tensor] = {}  # the latest ids of each embedding
        self._given: list[Tensor] = []  # all ids that it received in this step
        self._hidden: Tensor | None = None  # where the batch's attention mask hides a token, (B, T)
        self._handles: list[RemovableHandle] = []
        self._index: tuple[Tensor, Tensor] | None = None  # ids, and the places that are kept for them
        self._sums: Tensor | None = None  # losses and counts of this micro-batch, (2, V)
        self._recording, self._checked = False, False
        self._where = ""

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        first = 1 if self.full_first is None else self.full_first
        self._tokens = Tokens(
            session, WHO, self._choose, first=first, stop=-self.full_last or None, per_sample=True, also=self._find_ids
        )
        self._targets = Targets(session, WHO, self.labels)
        session.chain.add(Stage.TRANSFORM, self._link)
        session.chain.add(Stage.MEASURE, self._watch)  # within all passes, around the step's own use of its losses

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        self._where = f"of {self._tokens.find(self.layers)}"
        for m in session.module.modules():
            if isinstance(m, nn.Embedding):
                self._handles.append(hook_before(m, self._note))

    def _note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and (self._embedding is None or module is self._embedding):
            self._called[module] = args[0].detach()
            if module is self._embedding:
                self._given.append(self._called[module])

    @override
    def detach(self, session: Session) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._embedding, self._index, self._hidden = [], None, None, None
        self._called.clear()

    def _find_ids(self, step: Step, batch: Any) -> None:
        """Find the embedding of the blocks' tokens: one called on a tensor of the batch, or else the largest."""
        tokens = self._tokens.longest
        held = [t for _, t in tensors(batch) if not t.is_floating_point() and t.ndim == 2]

        def suits(ids: Tensor) -> bool:
            counts = torch.arange(ids.shape[-1], device=ids.device)
            return ids.ndim == 2 and ids.shape[1] == tokens and not torch.equal(ids - ids[:, :1], counts.expand_as(ids))

        found = [
            (any(t.shape == ids.shape and torch.equal(t, ids) for t in held), m.num_embeddings, m)
            for m, ids in self._called.items()
            if isinstance(m, nn.Embedding) and suits(ids)
        ]
        if not found:
            shapes = ", ".join(f"{tuple(ids.shape)}" for ids in self._called.values()) or "nothing"
            raise ValueError(
                f"{WHO}: no nn.Embedding was called on the ids of the {tokens} tokens that {self._tokens.stack} gets"
                f" (B, {tokens}), but on {shapes}. Remove {WHO}, which needs these ids."
            )
        self._embedding = max(found, key=lambda item: item[:2])[2]
        size = max(found, key=lambda item: item[:2])[1]
        if self.importance is None:
            self.importance = torch.full((size,), FIRST_IMPORTANCE)
        self._sets = self._special(size)
        self._called = {m: ids for m, ids in self._called.items() if m is self._embedding}

    def _special(self, size: int) -> tuple[Tensor, Tensor]:
        """Return which ids are special and which are padding, (V,) each."""
        sets = []
        for given, names in ((self.special_ids, (*SPECIAL, "mask_token_id")), (self.padding_ids, ("pad_token_id",))):
            ids = named_by_configs(self.session.module, names) if given is None else given
            marked = torch.zeros(size, dtype=torch.bool)
            for i in ids:
                if 0 <= i < size:
                    marked[i] = True
                elif given is not None:
                    raise ValueError(
                        f"{WHO}: the id {i} is not in the embedding of {size} ids. Use ids from 0 to {size - 1}."
                    )
            sets.append(marked)
        return sets[0], sets[1] & ~sets[0]

    # -- the step

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if torch.is_grad_enabled():  # no pass that scores samples
            self._recording, self._given = True, []
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        self._hidden = mask == 0 if isinstance(mask, Tensor) else None
        return self._tokens.run(step, batch, proceed)

    def _choose(self, at: At) -> Kept | None:
        active = self._tokens.stack.active
        first = max(active // 2 - 1, 1) if self.full_first is None else self.full_first
        if not first <= at.block < active - self.full_last:
            return None
        assert self._embedding is not None and self.importance is not None, "the first batch finds them"
        if torch._C._current_graph_task_id() >= 0 and not all(map(self._given[0].equal, self._given)):
            raise ValueError(
                f"{WHO}: the step calls the embedding on several texts, and block {at.block} is recomputed in the backward pass"
                f" for an unknown one of them. Disable gradient checkpointing, pass the texts as one batch, or remove {WHO}."
            )
        ids, (size, full) = self._called[self._embedding], at.hidden.shape[:2]
        if self._index is None or self._index[0] is not ids:
            if ids.shape != (size, full):
                raise ValueError(
                    f"{WHO}: block {at.block} gets {full} tokens of {size} samples, but the embedding got ids of shape"
                    f" {tuple(ids.shape)}. Remove {WHO}, which needs equal shapes, as in the first batch."
                )
            self.importance = self.importance.to(ids.device)
            special, padding = (marked.to(ids.device)[ids] for marked in self._sets)
            if self._hidden is not None and self._hidden.shape == ids.shape:
                special, padding = special & ~self._hidden, padding | self._hidden
            self._index = ids, chosen(self.importance[ids], special, padding, max(int(self.keep * full), 1))
        index = self._index[1]
        self._kept, self._full = index.shape[1], full
        return None if index.shape[1] == full else Kept(index)

    def _watch(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if not self._recording or self.importance is None or not self._targets.labels(step, batch):
            return proceed(batch)
        self._recording = False
        seen: list[int] = []
        over = False

        def change(call: TargetCall) -> Tensor:
            if not over:  # no recomputation by gradient checkpointing
                seen.append(self._record(call))
            return call.plain()

        output = self._targets.run(step, batch, proceed, change)
        over = True
        if not self._checked:
            self._check_seen(seen)
        return output

    @torch.no_grad()
    def _record(self, call: TargetCall) -> int:
        """Add the losses of one call to the sums, and return its number of classes."""
        assert self.importance is not None, "the first batch creates it"
        if not call.of_classes or call.target.is_floating_point():
            return 0
        z, size = call.scores.detach(), len(self.importance)
        if not _of_vocabulary(z.shape[-1], size):
            return z.shape[-1]
        target = call.target.clamp(0, z.shape[-1] - 1)
        counts = (call.valid & (target < size)).to(torch.float32)
        # -log p_v
        losses = z.float().logsumexp(dim=-1) - z.float().gather(-1, target.unsqueeze(-1)).squeeze(-1)
        both = torch.stack([torch.where(counts > 0, losses, 0.0).flatten(), counts.flatten()])
        if self._sums is None:
            self._sums = both.new_zeros(2, size)
        self._sums.index_add_(1, target.flatten().clamp(max=size - 1), both)
        return z.shape[-1]

    def _check_seen(self, classes: list[int]) -> None:
        assert self.importance is not None, "the first batch creates it"
        size, problem = len(self.importance), None
        if classes and not any(_of_vocabulary(count, size) for count in classes):
            problem = ValueError(
                f"{WHO}: the loss calls on the labels have {', '.join(map(str, classes))} classes, but the embedding has {size}"
                f" ids. Remove {WHO}, which needs a loss on the vocabulary."
            )
        agree(self.session, problem)
        self._checked = True

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if self.importance is None:
            return
        sums = torch.zeros(2, len(self.importance), device=session.module.device) if self._sums is None else self._sums
        if session.replicas.count > 1:
            torch.distributed.all_reduce(sums)
        self.importance = updated(self.importance.to(sums.device), sums[0], sums[1], beta=self.beta)
        self._sums, self._index, self._given = None, None, []

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        mean = 0.0 if self.importance is None else self.importance.mean()
        return {"kept": self._kept, "share": self._kept / self._full if self._full else 1.0, "importance": mean}

    @override
    def summary(self) -> str:
        if self.importance is None:
            return "made no step"
        seen = int((self.importance != FIRST_IMPORTANCE).sum())
        return (
            f"middle blocks {self._where} computed {self._kept} of {self._full} tokens, by the losses of {seen:,} ids"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        held = None if self.importance is None else self.importance.cpu()
        return {"importance": held, "kept": self._kept, "full": self._full}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.importance = state_dict["importance"]
        self._kept, self._full = state_dict["kept"], state_dict["full"]


def _of_vocabulary(classes: int, size: int) -> bool:
    """Return whether a loss has about as many classes as an embedding has ids, since either may be padded."""
    return abs(classes - size) <= max(8, size // 10)
