"""Token dropping: blocks in the middle run on the tokens that the network still learns something of (Hou et al. 2022)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._samples.scoring import agree
from lightning_eff._core._targets.calls import TargetCall
from lightning_eff._core._targets.window import Targets
from lightning_eff._core._tokens.inputs import Kept
from lightning_eff._core._tokens.window import At, Tokens
from lightning_eff._core.batches import tensors
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique

WHO = "TokenDropping"
FIRST_IMPORTANCE = 10.0  #: of an id that no loss has been seen of: above what losses are, so that such tokens are kept
_SPECIAL = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def updated(importance: Tensor, losses: Tensor, counts: Tensor, *, beta: float) -> Tensor:
    """``m_v = beta m_v + (1 - beta) l_v`` for each id v that was a target, with ``l_v`` the mean of its losses.

    Args:
        importance: m, (V,).
        losses: the sum of the losses of each id, (V,).
        counts: how many they are, (V,); where there is none, m stays.
        beta: in [0, 1).
    """
    return torch.where(counts > 0, beta * importance + (1 - beta) * losses / counts.clamp(min=1), importance)


def chosen(importance: Tensor, special: Tensor, padding: Tensor, count: int) -> Tensor:
    """The places of the ``count`` most important tokens of each sample, (B, k), k >= ``count``.

    Special tokens come before all others, so k is larger where a sample has more of them; padding comes last. Of equal ones
    the first are taken.

    Args:
        importance: of each token, (B, T).
        special: which are always kept, (B, T).
        padding: which are left out first, (B, T).
        count: how many.
    """
    ranked = importance.masked_fill(padding, -torch.inf).masked_fill(special, torch.inf)
    count = max(count, int(special.sum(dim=1).max()))
    return ranked.argsort(dim=1, descending=True, stable=True)[:, :count]


def _pointless(profile: RunProfile) -> str | None:
    if profile.num_blocks < 3:
        return "no stack of at least three blocks was found, of which one is in the middle"
    if profile.sequence_length is None:
        return "samples are no sequences"
    return None if profile.visible_loss else "the losses of tokens cannot be seen"


class TokenDropping(Technique):
    """Let blocks in the middle of a language model run on the half of the tokens with the largest losses so far.

    For each id of the vocabulary a running mean of the losses is kept with which the network predicted it: ids that it knows
    well by now count little. Of each sequence, the blocks from the middle on, up to the last but ``full_last``, are called on
    the share ``keep`` of the tokens whose ids count most; the others bypass them bit for bit as they are, and rejoin at the
    last block. (In the authors' code the first of these blocks still attends to all tokens; here a block sees those that it is
    called on.) Tokens of ``special_ids`` are always kept. Padding is left out first: the ids of ``padding_ids``, and places
    where the batch's ``attention_mask`` is 0. Masks, positions and rotary tables go along. Validation, test and prediction
    always see all tokens. In training, the ids of the whole sequence decide which tokens the middle blocks skip, so in a
    causal model later tokens decide it for earlier ones. The paper trains BERT.

    The losses are those of the step's own loss calls on the vocabulary; of techniques that run a step twice, those of the
    first pass. Ranks add theirs up, so all have the same running means, which are in checkpoints. An id begins at 10, as in
    the authors' code: higher than losses are, so what has not been predicted yet is kept.

    Under :class:`ProgressiveStacking` the middle is that of the blocks that run.

    Logged: ``kept``, the tokens of a sample that a middle block ran on in the last step, ``share``, their share of all, and
    ``importance``, the mean of the running losses.

    Args:
        keep: the share of the tokens that middle blocks run on, in (0, 1]; 1 is plain training.
        beta: of the running mean, in [0, 1): how much of it stays when an id is seen again.
        special_ids: ids of tokens that are always kept, such as BERT's [100, 101, 102, 103], ``[MASK]`` among them. None
            takes those that the ``config`` of a Hugging Face model names (beginning, end, class, separator, mask).
        padding_ids: ids of tokens that are left out first; None takes the ``config``'s ``pad_token_id``.
        full_first: blocks at the front that run on all tokens, >= 0; None for one less than half of them, at least 1.
        full_last: blocks at the end that run on all tokens, >= 0.
        labels: names or positions of the labels in the batch, where several tensors of it become targets.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.

    Raises:
        ValueError: if an argument is out of its range; at setup, if there is no stack, or none of its blocks is in the
            middle; at the first batch, before any weight has changed, if no embedding is called on ids of the blocks' tokens,
            no loss on the vocabulary can be seen, or a block cannot be given fewer of its tokens; where a step runs several
            texts through blocks that are checkpointed.

    Sources:
        Hou et al. 2022, arXiv:2203.13240.
    """

    saves: ClassVar[str] = "compute and activations of the tokens that middle blocks leave out: a quarter of BERT's"
    paper: ClassVar[str] = "Hou et al. 2022, arXiv:2203.13240"
    constraints: ClassVar[str] = (
        "automatic optimization; a language model with an nn.Embedding of its ids and a loss on the vocabulary by"
        " torch.nn.functional; a stack of three blocks or more, of which each token is computed by what is handed in with it"
    )
    survey: ClassVar[Survey | None] = Survey("token dropping", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"keep": Uniform(0.25, 0.75), "beta": Choice((0.95, 0.995))}, _pointless
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero; and RandomLTD, which chooses blindly"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "RandomLTD": "both choose the tokens that middle blocks run on",
        "PatchDropout": "both choose the tokens that blocks compute",
    }

    def __init__(
        self,
        keep: float = 0.5,
        *,
        beta: float = 0.995,
        special_ids: Sequence[int] | None = None,
        padding_ids: Sequence[int] | None = None,
        full_first: int | None = None,
        full_last: int = 1,
        labels: Sequence[str | int] | None = None,
        layers: str | Sequence[str] | None = None,
    ) -> None:
        if not 0.0 < keep <= 1.0:
            raise ValueError(
                f"{WHO}({keep=}): expected a share of the tokens in (0, 1], that which middle blocks run on. 0.5 is the"
                " paper's; 1 is plain training."
            )
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{WHO}({beta=}): expected a number in [0, 1), how much of a running mean stays.")
        for name, ids in (("special_ids", special_ids), ("padding_ids", padding_ids)):
            listed = isinstance(ids, list | tuple)
            if ids is not None and not (listed and all(type(i) is int and i >= 0 for i in ids)):
                raise ValueError(f"{WHO}({name}={ids!r}): expected a list of ids >= 0, such as [101, 102], or None.")
        for name, value in (("full_first", full_first), ("full_last", full_last)):
            if name == "full_first" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= 0, a number of blocks.")
        if isinstance(labels, str):
            raise ValueError(f"{WHO}({labels=}): expected a list of names or positions. Write [{labels!r}].")
        self.keep = keep
        self.beta = beta
        self.special_ids = None if special_ids is None else list(special_ids)
        self.padding_ids = None if padding_ids is None else list(padding_ids)
        self.full_first = full_first
        self.full_last = full_last
        self.labels = labels
        self.layers = layers
        self._reset()

    def _reset(self) -> None:
        self.importance: Tensor | None = None  # m, (V,); None before the first batch
        self._kept, self._full = 0, 0  # of the last step
        self._embedding: nn.Module | None = None
        self._called: dict[nn.Module, Tensor] = {}  # by the embedding, its latest ids
        self._given: list[Tensor] = []  # all ids that it got in this step
        self._hidden: Tensor | None = None  # where the batch's attention mask hides a token, (B, T)
        self._handles: list[RemovableHandle] = []
        self._index: tuple[Tensor, Tensor] | None = None  # ids, and the places that were chosen for them
        self._sums: Tensor | None = None  # of this micro-batch, losses and counts, (2, V)
        self._recording, self._checked = False, False
        self._where = ""

    @property
    @override
    def neutral(self) -> bool:
        return self.keep == 1.0

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        first = 1 if self.full_first is None else self.full_first
        self._tokens = Tokens(
            session, WHO, self._choose, first=first, stop=-self.full_last or None, per_sample=True, also=self._find_ids
        )
        self._targets = Targets(session, WHO, self.labels)
        session.chain.add(Stage.TRANSFORM, self._link)
        session.chain.add(Stage.MEASURE, self._watch)  # within all passes, and around what a step makes of its losses

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        self._where = f"of {self._tokens.find(self.layers)}"
        for m in session.module.modules():
            if isinstance(m, nn.Embedding):
                self._handles.append(m.register_forward_pre_hook(self._note))

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
        """Which embedding takes the ids of the blocks' tokens: the batch's own, else of most ids."""
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
            shapes = ", ".join(f"{tuple(ids.shape)}" for ids in self._called.values()) or "none"
            raise ValueError(
                f"{WHO}: no nn.Embedding was called on the ids of the {tokens} tokens that {self._tokens.stack} gets"
                f" (called on: {shapes}); expected one on ids (B, {tokens}), by which the losses of tokens are told. Take the"
                " technique out."
            )
        self._embedding = max(found, key=lambda item: item[:2])[2]
        size = max(found, key=lambda item: item[:2])[1]
        if self.importance is None:
            self.importance = torch.full((size,), FIRST_IMPORTANCE)
        self._sets = self._special(size)
        self._called = {m: ids for m, ids in self._called.items() if m is self._embedding}

    def _special(self, size: int) -> tuple[Tensor, Tensor]:
        """Which ids are special, and which are padding, (V,) each."""
        configs = [m.config for m in self.session.module.modules() if hasattr(m, "config")]
        sets = []
        for given, names in ((self.special_ids, _SPECIAL), (self.padding_ids, ("pad_token_id",))):
            told = [getattr(config, name, None) for config in configs for name in names]
            ids = (
                [i for one in told for i in (one if isinstance(one, list | tuple) else [one])]
                if given is None
                else given
            )
            marked = torch.zeros(size, dtype=torch.bool)
            for i in ids:
                if isinstance(i, int) and 0 <= i < size:
                    marked[i] = True
                elif given is not None:
                    raise ValueError(
                        f"{WHO}: got the id {i} of {size} that the embedding has; expected one of 0 .. {size - 1}."
                    )
            sets.append(marked)
        return sets[0], sets[1] & ~sets[0]

    # -- the step

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if torch.is_grad_enabled():  # not a pass that scores samples
            self._recording, self._given = True, []
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        self._hidden = mask == 0 if isinstance(mask, Tensor) else None
        return self._tokens.run(step, batch, proceed)

    def _choose(self, at: At) -> Kept | None:
        active = self._tokens.stack.active
        first = max(active // 2 - 1, 1) if self.full_first is None else self.full_first
        if not first <= at.block < active - self.full_last:
            return None
        assert self._embedding is not None and self.importance is not None, "they were found with the first batch"
        if torch._C._current_graph_task_id() >= 0 and not all(map(self._given[0].equal, self._given)):
            raise ValueError(
                f"{WHO}: the step has called the embedding on several texts, and block {at.block} runs again in the backward"
                " pass, as gradient checkpointing lets it; expected one text, since it cannot be told which of them this call"
                " is on. Switch checkpointing off, hand the texts over in one batch, or take the technique out."
            )
        ids, (size, full) = self._called[self._embedding], at.hidden.shape[:2]
        if self._index is None or self._index[0] is not ids:
            if ids.shape != (size, full):
                raise ValueError(
                    f"{WHO}: block {at.block} gets {full} tokens of {size} samples, and the embedding got ids of the shape"
                    f" {tuple(ids.shape)}; expected as many of both, as in the first batch."
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
            if not over:  # and not what gradient checkpointing runs again
                seen.append(self._record(call))
            return call.plain()

        output = self._targets.run(step, batch, proceed, change)
        over = True
        if not self._checked:
            self._check_seen(seen)
        return output

    @torch.no_grad()
    def _record(self, call: TargetCall) -> int:
        """Add up the losses of one call; how many classes it is on."""
        assert self.importance is not None, "it was made with the first batch"
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
        assert self.importance is not None, "it was made with the first batch"
        size, problem = len(self.importance), None
        if classes and not any(_of_vocabulary(count, size) for count in classes):
            problem = ValueError(
                f"{WHO}: the loss calls on the labels are on {', '.join(map(str, classes))} classes, and the embedding has"
                f" {size} ids; expected a loss on the vocabulary, which tells how well each id is predicted. Take the technique"
                " out."
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
            return "no step taken"
        seen = int((self.importance != FIRST_IMPORTANCE).sum())
        return f"{self._kept} of {self._full} tokens in the middle {self._where}, by the losses of {seen:,} ids"

    @override
    def state_dict(self) -> dict[str, Any]:
        held = None if self.importance is None else self.importance.cpu()
        return {"importance": held, "kept": self._kept, "full": self._full}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.importance = state_dict["importance"]
        self._kept, self._full = state_dict["kept"], state_dict["full"]


def _of_vocabulary(classes: int, size: int) -> bool:
    """Whether a loss is on the ids that an embedding has, one of which may be padded."""
    return abs(classes - size) <= max(8, size // 10)
