"""MultiTokenPrediction: also predict the tokens after the next one (Gloeckle et al. 2024, arXiv:2404.19737).

The loss is ``L_1 + sum_{k > 1} w_k L_k``, where L_k is the cross-entropy of the token at offset k, computed by the same output
layer from ``h + SiLU(W_k h)`` for the last hidden state h (Cai et al. 2024, arXiv:2401.10774), or from h itself.
"""

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.batch import BatchKeys
from lightning_eff._core._arguments.kinds import Each, Fraction, Number, Text
from lightning_eff._core._needs.needs import UNTRIED, Need, Part, Reasons
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._stack.compiled import uncompiled
from lightning_eff._core._targets.calls import TargetCall
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.batches import num_samples
from lightning_eff._core.losses import LossNotVisible, counts_of, loss_of
from lightning_eff._core.search_space import Choice, SearchSpace, needs_sequences
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.tokens._head.calls import Node
from lightning_eff.data.tokens._head.finding import Window
from lightning_eff.data.tokens._head.stand_in import Logits
from lightning_eff.data.tokens.ahead._causal import looked_up, sees_later
from lightning_eff.data.tokens.ahead._head import Ahead, head_of, site_of, transformed, with_transforms

WHO = "MultiTokenPrediction"


def weight_at(u: float, weight: float, span: tuple[float, float] | None) -> float:
    """Return ``w_k min(1, max(0, (b - u) / (b - a)))`` for the used fraction u of the budget and a span (a, b)."""
    if span is None:
        return weight
    a, b = span
    return weight * min(1.0, max(0.0, (b - u) / (b - a)))


def targets_ahead(labels: Tensor, places: Tensor, k: int, ignored: int) -> Tensor:
    """Return the label k - 1 positions after each element's own; ``ignored`` if one of them is, or the text has ended.

    Args:
        labels: (B, T); the label at an element's place is the token at offset 1.
        places: the index of each element's label in the flattened labels; -1 for none.
        k: the offset, >= 1.
        ignored: the label that does not count.
    """
    length, flat = labels.shape[1], labels.flatten()
    counts = (places >= 0) & (places % length + k <= length)
    for j in range(k):
        counts = counts & (flat[(places + j).clamp(0, flat.numel() - 1)] != ignored)
    return torch.where(counts, flat[(places + k - 1).clamp(0, flat.numel() - 1)], ignored)


def loss_ahead(call: TargetCall, logits: Tensor, target: Tensor) -> Tensor:
    """Return the call's loss of other logits and targets; 0 if no target counts."""
    arguments = {**call.arguments, "input": logits, "target": target}
    losses = call.fn(**{**arguments, "reduction": "none"})
    if call.reduction != "mean":
        return losses.sum() if call.reduction == "sum" else losses
    counted = counts_of(call.fn, arguments, losses).sum()
    return losses.sum() / torch.where(counted > 0, counted, 1.0)


class MultiTokenPrediction(Architecture):
    """Also train the last hidden state to predict the second next token, the third, and so on.

    Each further token has a weight w_k in the loss. The losses of further tokens use the module's own output layer, with its
    bias, caps and scales, on the last hidden state h. With ``heads="own"`` each offset has a transform ``h + SiLU(W_k h)``
    with a weight (D, D), zero at first. With ``heads="shared"`` the same logits are compared with several tokens, as in the
    NanoGPT speedrun, and the weights should decay to zero. Hidden state and output layer are found by looking at a pass,
    whether the module shifts its labels or the loader does. A further token counts if no label up to it is ignored. So
    padding and prompts do not count, nor tokens of the next text in a packed row whose texts begin with an ignored label.
    The first batch is run once more, to verify by gradients that hidden states do not depend on later tokens.

    Use it to pretrain language models and decoders. Gloeckle et al. report gains for code and for models of billions of
    parameters, and losses for small ones. Each offset costs as much as the output layer, in time and in memory for logits.
    Validation, test and prediction use the next token only. The loss that ``training_step`` returns and logs includes the
    further tokens. With own heads, checkpoints have the transforms next to the output layer: they load into
    ``lightning_eff.apply(plain, MultiTokenPrediction(...))``, and ``export`` removes them. It logs ``loss_2``, ``loss_3``, ...,
    the last losses, and ``weight_2``, ... .

    Args:
        weights: w_2, w_3, ..., each >= 0. An empty list, or zeros alone, is plain training.
        heads: "own" transforms per offset, or "shared" logits.
        decay: for each weight, the fractions of the budget between which it decays linearly to zero. The speedrun's form is
            ``weights=(0.5, 0.25), decay=[(0.33, 0.67), (0, 0.33)]``. None keeps the weights.
        head: the path of the output layer, or of the embedding whose weight computes logits. None finds it.
        labels: the name or position of the labels in the batch. None takes the tensor that is the target of the loss.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if no output layer is found. At the first batch, before
            any weight changes, if labels are not classes (B, T), if the loss is not F.cross_entropy of the output layer's
            logits, or if hidden states depend on later tokens.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[MultiTokenPrediction((0.3, 0.1))])

    References:
        Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token Prediction", arXiv:2404.19737.
        Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework", arXiv:2401.10774 (the transform).
        Jordan et al. 2024, modded-nanogpt, github.com/KellerJordan/modded-nanogpt (shared logits with decaying weights).
    """

    saves = "steps: a denser signal per token; costs an output layer per offset"
    paper = "Gloeckle et al. 2024, arXiv:2404.19737"
    constraints = (
        "causal language models and decoders whose loss is F.cross_entropy of a linear layer's output, outside compiled"
        " modules; automatic optimization"
    )
    search_space = SearchSpace(
        {"weights": Choice(((0.3,), (0.5, 0.25))), "heads": Choice(("own", "shared"), each=True)}, needs_sequences
    )
    control = Control("the baseline for the same time with its learning rate decayed to zero")
    needs: ClassVar[Need] = Need.MODULE | Need.CALLS | Need.STEP
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        **dict.fromkeys((Part.SHARD, Part.TENSOR, Part.ITSELF, Part.PIPELINE), UNTRIED),
    }
    needs_automatic_optimization: ClassVar[bool] = True
    change_at = Change.ADAPT
    conflicts: ClassVar[Mapping[str, str]] = {
        "FusedLinearCrossEntropy": "both compute the output layer within the loss",
        "KFAC": "it needs the gradients of each layer's output, so the logits must exist",
        **dict.fromkeys(
            ("GhostNorm", "SeqNorm"), "it is for networks with BatchNorm, whose states depend on later tokens"
        ),
        "PromptTuning": "its prompts are positions without a label",
        "RobustImportanceSampling": "it takes gradients of the next token's loss at the logits, and further tokens have others",
        "SAF": "it compares the outputs of all losses with those of earlier epochs, and would take further tokens' for others",
    }
    checkpointed = ("_batches", "_checked", "_matched")  # a pass to check again would move what other code counts

    def __init__(
        self,
        weights: Annotated[Sequence[float], Each(Number(at_least=0), empty=True)] = (0.3, 0.1),
        *,
        heads: Literal["own", "shared"] = "own",
        decay: Annotated[Sequence[tuple[float, float]] | None, Each(Each(Fraction(), length=2))] = None,
        head: Annotated[str | None, Text("a dotted path of a module")] = None,
        labels: Annotated[Sequence[str | int] | None, BatchKeys()] = None,
    ) -> None:
        if decay is not None and (len(decay) != len(weights) or any(a >= b for a, b in decay)):
            raise ValueError(
                f"{WHO}({decay=}): expected a pair (a, b) with a < b for each of {len(weights)} weights. Example:"
                " weights=(0.5, 0.25), decay=[(0.33, 0.67), (0.0, 0.33)]."
            )
        self.weights, self.heads, self.decay, self.head, self.labels = weights, heads, decay, head, labels
        self.needs_budget = decay is not None  # pyright: ignore[reportAttributeAccessIssue] -- of this instance alone

    @property
    @override
    def neutral(self) -> bool:
        return not any(self.weights)

    def _reset(self) -> None:
        self._path = ""
        self._batches = 0
        self._window: Window | None = None
        self._checked = self._matched = False
        self._last: dict[str, float | int | Tensor] = {}

    @override
    def settings(self) -> dict[str, Any]:
        """The settings that decide which parameters there are."""
        return {"offsets": self._offsets, "head": self.head}

    @property
    def _offsets(self) -> list[int]:
        """The offsets that have a transform."""
        return [k for k, w in enumerate(self.weights, 2) if w] if self.heads == "own" else []

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        path = head_of(surgeon.root, self.head, surgeon.batch, who=WHO)

        def build(plain: nn.Module) -> nn.Module:
            return with_transforms(plain, self._offsets, cast(Tensor, plain.weight).shape[1])

        surgeon.swap(lambda at, m: at == path, build, what="an output layer")
        rank_zero_info(f"{WHO}: predicts {1 + sum(map(bool, self.weights))} tokens by {path}.")

    # -- every step

    @override
    def attach(self, session: Session) -> None:
        self._targets = Targets(session, WHO, self.labels)
        self.nodes: weakref.WeakSet[Node] = weakref.WeakSet()
        session.chain.add(Stage.REWEIGHT, self._link)
        session.chain.add(Stage.SAVE, self._opened)

    @override
    def on_model(self, session: Session) -> None:
        if session.fitting:
            path, self._of = next((path, m) for path, m in session.module.named_modules() if isinstance(m, Ahead))
            self._window = Window(session.module, self, [site_of(session.module, path)])
            self._path = path

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        labels = self._targets.labels(step, batch)
        self._batches += 1
        if not labels:  # the step skips this batch
            return proceed(batch)
        if not self._checked:
            on_all_ranks(self.session, lambda: self._check(step, batch, labels))
            self._checked = True
        spans = self.decay or [None] * len(self.weights)
        u = self.session.progress.u
        now = {k: weight_at(u, w, span) for k, (w, span) in enumerate(zip(self.weights, spans, strict=True), 2) if w}
        self._last = {f"weight_{k}": w for k, w in now.items()}

        def change(call: TargetCall) -> Tensor:
            loss = call.plain()
            if not loss.requires_grad:
                return loss  # a pass that scores samples
            return self._with_further(call, labels[call.label], loss, now)

        return self._targets.run(step, batch, proceed, change)

    def _with_further(self, call: TargetCall, labels: Tensor, loss: Tensor, weights: Mapping[int, float]) -> Tensor:
        node = self._node(call)
        ignored = call.arguments["ignore_index"]
        known = targets_ahead(labels, call.element_places, 1, ignored) == call.target
        if not self._matched:
            if not bool(known.all()):
                raise ValueError(
                    f"{WHO}: the targets of F.{call.fn.__name__} are not the labels {call.label} at their positions, so further"
                    f" tokens are unknown. Give labels that are token ids, with {ignored} where none counts, or remove {WHO}."
                )
            self._matched = True
        h = node.call.x
        for k, w in weights.items():
            if w == 0:  # every parameter has a gradient, as DDP expects
                loss = loss + 0.0 * transformed(self._of, k, h[..., :1, :]).sum()
                continue
            z = transformed(self._of, k, h)
            logits = node.value() if z is h else node.compute({id(h): z})
            # a later batch may have targets that are not its labels; the tokens after these are unknown
            target = torch.where(known, targets_ahead(labels, call.element_places, k, ignored), ignored)
            further = loss_ahead(call, logits, target)
            self._last[f"loss_{k}"] = further.detach().mean()
            loss = loss + w * further
        return loss

    def _node(self, call: TargetCall) -> Node:
        given = call.arguments["input"]
        if not isinstance(given, Logits):
            raise LossNotVisible(
                f"{WHO}: the loss F.{call.fn.__name__} on {call.label} is not of the output of {self._path}, as far as it can"
                f" be followed. Name the output layer, {WHO}(head=...), or compute the loss from its output, outside compiled"
                f" modules, or remove {WHO}."
            )
        return given._node

    # -- placeholders

    def _opened(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if self._window is not None and torch.is_grad_enabled() and self._window.open():
            self.session.when_step_ends(self._close)
        return proceed(batch)

    def _close(self) -> None:
        if sys.exc_info()[0] is None:
            for node in [node for node in self.nodes if node.held]:
                node.value()  # before weights change
        self.nodes.clear()
        if self._window is not None:
            self._window.close()

    def loss(self, node: Node, arguments: dict[str, Any]) -> Tensor | None:
        """See :class:`~lightning_eff.data.tokens._head.calls.Maker`."""
        return None

    def read(self, node: Node, name: str) -> None:
        """See :class:`~lightning_eff.data.tokens._head.calls.Maker`."""

    # -- the first batch

    def _check(self, step: Step, batch: Any, labels: Mapping[str, Tensor]) -> None:
        for path, y in labels.items():
            if y.ndim != 2 or y.is_floating_point():
                raise ValueError(
                    f"{WHO}: the labels {path or 'in the batch'} {tuple(y.shape)} {str(y.dtype)[6:]} are no tokens (B, T), so"
                    f" there are none after the next one. Name the labels by labels=, or remove {WHO}."
                )
        look = _Look()
        window = Window(step.module, look, [site_of(step.module, self._path)])
        found: list[Tensor] = []

        def around(run: Proceed, batch: Any) -> Any:
            with torch.enable_grad(), uncompiled(), looked_up(step.module) as outputs:
                window.open()
                try:
                    output = run(batch)
                finally:
                    window.close()
                found.extend(outputs)
                return output

        output = step.forward_only(batch, num_samples(batch), around, transform=False)
        if loss_of(output) is None or not look.hidden:
            return  # the loss call itself says that it is not of the output layer
        for h in look.hidden:
            why = sees_later(h, found, next(iter(labels.values())))
            if why is not None:
                raise ValueError(
                    f"{WHO}: {self._path} {why}. Train causal models and decoders with it, or remove {WHO}."
                )

    # -- reports

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key not in ("nodes", "_of", "_window")}

    @override
    def detach(self, session: Session) -> None:
        if self._window is not None:
            self._window.close()
        self._window = None
        super().detach(session)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._last)

    @override
    def summary(self) -> str:
        return f"trained {len(self._last) and sum(map(bool, self.weights))} further tokens in {self._batches:,} batches"


class _Look:
    """Records the hidden states of losses.

    Attributes:
        hidden: the output layer's inputs.
        nodes: see :class:`~lightning_eff.data.tokens._head.calls.Maker`.
    """

    def __init__(self) -> None:
        self.nodes: weakref.WeakSet[Node] = weakref.WeakSet()
        self.hidden: list[Tensor] = []

    def loss(self, node: Node, arguments: dict[str, Any]) -> Tensor | None:
        self.hidden.append(node.call.x)
        return None

    def read(self, node: Node, name: str) -> None:
        pass
