"""The output layer and its cross-entropy in one kernel, on the positions that count (Izsak et al. 2021; Hsu et al. 2024)."""

import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Number, OneOf
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core._stack.compiled import uncompiled
from lightning_eff._core.batches import num_samples
from lightning_eff._core.losses import LossNotVisible, loss_of
from lightning_eff._core.search_space import SearchSpace, needs_sequences
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._head.calls import Node
from lightning_eff.data.tokens._head.finding import Maps, Site, Window, reader, site_at
from lightning_eff.data.tokens._head.loss import fused_loss

WHO = "FusedLinearCrossEntropy"
_MEND = (
    "Use F.cross_entropy (or nn.CrossEntropyLoss, or Hugging Face's loss) on the output of an nn.Linear, or of a product with"
    f" a parameter, outside compiled modules, or remove {WHO}."
)


class _Look:
    """Find the layers whose outputs reach a cross-entropy, in one pass.

    Attributes:
        found: the layers, by their key.
        reads: the first use of each layer's output.
        unfit: cross-entropies of layers that need the logits.
        nodes: see :class:`~lightning_eff.data.tokens._head.calls.Maker`.
    """

    def __init__(self, rows: int | None) -> None:
        self.nodes: weakref.WeakSet[Node] = weakref.WeakSet()
        self.rows = rows
        self.found: dict[int, Site] = {}
        self.reads: dict[Site, str] = {}
        self.unfit: list[str] = []

    def loss(self, node: Node, arguments: dict[str, Any]) -> Tensor | None:
        made = fused_loss(node, arguments, self.rows)
        if made is None:
            self.unfit.append(f"F.cross_entropy of {node.call.site} at {reader()}")
            return None
        self.found[node.call.site.key] = node.call.site
        return made[0]

    def read(self, node: Node, name: str) -> None:
        self.reads.setdefault(node.call.site, f"torch's {name!r} at {reader()}")


class FusedLinearCrossEntropy(Technique):
    """Compute the output layer and its cross-entropy together, without storing the logits.

    Logits have positions times vocabulary entries. With 128k classes, they, their softmax and their gradient are most of a
    language model's memory. Here a few rows are computed at a time, together with the gradients, which are accumulated
    (``kernels/linear_cross_entropy.py``). Positions whose label is ``ignore_index``, or that never reach the loss, are skipped:
    85 % of the output layer in a masked language model. Loss and gradients equal those of plain training up to rounding, and
    are more accurate in bfloat16.

    Use it for language models with a large vocabulary. A layer with few classes gains nothing, which is logged;
    ``min_classes`` leaves it alone. For a small masked language model with 8,256 classes, most of the step time is saved
    (docs/evidence.md), as with ModernBERT's own ``sparse_prediction``.

    The layer is found at the first batch, in a forward pass that stores no logits either. It is each ``nn.Linear``, or product
    with a parameter (``F.linear(x, self.embed.weight)``), whose output reaches ``F.cross_entropy`` (or ``F.nll_loss`` through
    ``log_softmax``), in your code or in a library such as transformers. Shifts, reshapes, transpositions, selections by masks,
    upcasts, scales by a number, a bias of classes and caps by ``tanh`` may be in between. Tied weights, several layers and
    several losses are supported. ``ignore_index``, ``label_smoothing``, ``reduction`` and class weights (without smoothing) are
    those of the call.

    In training, a placeholder replaces the logits. Other uses of it, such as a metric, compute the logits on demand, and are
    logged. If this happens in each step, it costs another forward pass of the layer. Cross-entropies with probabilities as
    targets use the logits. Validation, test and prediction are unchanged.

    It logs ``rows``, the rows that the last step computed, ``ignored_share``, the fraction of its positions that was skipped,
    ``logits_bytes``, the size of plain logits, and ``reads``, the number of other uses of the logits in the step.

    Args:
        rows: the number of rows of logits that are computed at a time. None is at most a quarter of the rows, and at most 256
            on a CPU. On a GPU the limit is 512 to 4096, by vocabulary and width: the logits take at most 1 GiB if 512 rows do.
        min_classes: the smallest number of classes of a layer to which it applies. ``math.inf`` is plain training.

    Raises:
        ValueError: for a value out of range. At setup, under manual optimization or pipeline parallelism. At the first batch,
            on all ranks and before any weight changes, if no cross-entropy of a linear layer's output is found, or all of
            them need the logits.
        RuntimeError: if the layer's input is changed in place before the loss, or its gradients are differentiated.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[FusedLinearCrossEntropy()])

    References:
        Izsak et al. 2021, "How to Train BERT with an Academic Budget", arXiv:2104.07705 (sparse token prediction).
        Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv:2410.10989.
    """

    saves = "the memory of the logits, and the output layer's time on positions without a label"
    paper = "Izsak et al. 2021, arXiv:2104.07705; Hsu et al. 2024, arXiv:2410.10989"
    constraints = (
        "needs F.cross_entropy of a linear layer's output, outside compiled modules; automatic optimization; no second-order"
        " gradients"
    )
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    search_space = SearchSpace(pointless=needs_sequences, measured_on=lambda profile: profile.masked_labels)
    sparse_gradients: ClassVar[bool] = True
    control = Control("the baseline for the same time, since loss and gradients differ only by rounding")
    conflicts: ClassVar = {"KFAC": "it needs the gradients of each layer's output, so the logits must exist"}
    neutral_at: ClassVar[Mapping[str, Any]] = {"min_classes": math.inf}

    def __init__(
        self,
        *,
        rows: Annotated[int, Count()] | None = None,
        min_classes: Annotated[float, Either(Number(at_least=2), OneOf(math.inf))] = 2,
    ) -> None:
        self.rows = rows
        self.min_classes = min_classes

    def _reset(self) -> None:
        self._sites: list[Site] | None = None
        self._saved: list[list[Any]] = []  # the layers of a checkpoint, until its run resumes
        self._window: Window | None = None
        self._checked = False
        self._logged: set[tuple[str, str]] = set()
        self._first_read = ""
        self._begin()

    def _begin(self) -> None:
        self._calls = self._computed = self._positions = self._bytes = self._reads = 0

    @override
    def attach(self, session: Session) -> None:
        if hasattr(session.trainer.strategy, "whole_heads"):
            session.patches.set(session.trainer.strategy, "whole_heads", True)
        session.told_by_loss(self, "_calls", "_computed", "_positions", "_bytes", "_reads")
        self.nodes: weakref.WeakSet[Node] = weakref.WeakSet()
        session.chain.add(Stage.SAVE, self._link)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if self._sites is None:
            self._find(step, batch)
        if self._window is None:
            return proceed(batch)
        self._begin()
        if self._window.open():
            self.session.when_step_ends(self._close)
        output = proceed(batch)
        if not self._checked:
            self._check_first(step, loss_of(output) is not None)
        return output

    def _close(self) -> None:
        """End the step: compute the logits that are still referenced, before weights change."""
        if sys.exc_info()[0] is None:
            for node in [node for node in self.nodes if node.held]:
                node.value()
        self.nodes.clear()
        if self._window is not None:
            self._window.close()

    # -- placeholders

    def loss(self, node: Node, arguments: dict[str, Any]) -> Tensor | None:
        """See :class:`~lightning_eff.data.tokens._head.calls.Maker`."""
        made = fused_loss(node, arguments, self.rows)
        if made is None:
            return None
        positions = arguments["target"].numel()
        self._calls += 1
        self._computed += made[1]
        self._positions += positions
        self._bytes += positions * node.rows.classes * node.dtype.itemsize
        return made[0]

    def read(self, node: Node, name: str) -> None:
        """See :class:`~lightning_eff.data.tokens._head.calls.Maker`."""
        self._reads += 1
        where = f"torch's {name!r} at {reader()}"
        self._first_read = self._first_read or where
        if (str(node.call.site), where) not in self._logged:
            self._logged.add((str(node.call.site), where))
            rank_zero_info(f"{WHO}: {where} also reads the logits of {node.call.site}, so they are computed for it.")

    # -- the first batch

    def _find(self, step: Step, batch: Any) -> None:
        sites, problem = None, None
        try:
            kept = [saved for saved in self._saved if saved[2] >= self.min_classes]
            sites = kept or self._look(step, batch)
        except ValueError as error:
            problem = error
        every = agree(self.session, problem, sites)
        if all(found is not None for found in every):
            # the layers of all ranks, so that a checkpoint has them all
            different = dict.fromkeys(tuple(saved) for found in every for saved in found)
            sites = self._sites = [site_at(step.module, *saved) for saved in different]
            self._window = Window(step.module, self, sites)
            layers = ", ".join(f"{site} ({site.classes:,} classes)" for site in sites)
            rank_zero_info(f"{WHO}: computes the loss without the logits of {layers}.{_few(sites)}")

    def _look(self, step: Step, batch: Any) -> list[list[Any]] | None:
        """Return the output layers in checkpoint form, or None if the step skips this batch."""
        try:
            look, maps, output = self._pass(step, batch, graph=False)
        except RuntimeError:  # a step that computes gradients itself
            look, maps, output = self._pass(step, batch, graph=True)
        found = list(look.found.values())
        heads = [site for site in found if site.classes >= self.min_classes]
        for site in heads:
            if _is_apart(site.module):
                raise ValueError(
                    f"{WHO}: fully_shard was applied to {site} itself, so its weight is sharded when the loss needs it. Leave"
                    f" it to the root's fully_shard, or remove {WHO}."
                )
        if heads:
            return [site.saved for site in heads]
        if loss_of(output) is None:
            return None
        if found:
            left = ", ".join(f"{site} has {site.classes}" for site in found)
            raise LossNotVisible(
                f"{WHO}(min_classes={self.min_classes}): {left}, and no other output layer was found. Lower"
                f" min_classes, or remove {WHO}."
            )
        raise LossNotVisible(f"{WHO}: {_none_found(look, maps, step.module)}")

    def _pass(self, step: Step, batch: Any, *, graph: bool) -> tuple[_Look, Maps, Any]:
        """Run the module's step without side effects, with placeholders for the outputs of all its linear layers."""
        look = _Look(self.rows)
        maps = Maps(step.module, look)

        def around(run: Proceed, batch: Any) -> Any:
            with torch.set_grad_enabled(graph), uncompiled(), maps:
                return run(batch)

        return look, maps, step.forward_only(batch, num_samples(batch), around, transform=False)

    def _check_first(self, step: Step, ready: bool) -> None:
        problem = None
        if ready and not self._calls:
            heads = ", ".join(map(str, self._sites or ()))
            why = f" {self._first_read} reads them instead." if self._first_read else ""
            problem = LossNotVisible(
                f"{WHO}: found no cross-entropy of the logits of {heads} in the first training step.{why}"
                f"{_compiled(step.module)} Code without a gradient is not followed, such as a checkpoint with"
                f" use_reentrant=True. {_MEND}"
            )
        self._checked = all(agree(self.session, problem, ready))

    # -- reports

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "nodes"}  # weak references

    @override
    def detach(self, session: Session) -> None:
        if self._window is not None:
            self._window.close()
        self._window = None

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        share = 1 - self._computed / self._positions if self._positions else 0.0
        return {
            "rows": self._computed,
            "ignored_share": share,
            "logits_bytes": self._bytes,
            "reads": self._reads,
        }

    @override
    def summary(self) -> str:
        if self._sites is None:
            return "made no step"
        heads = ", ".join(map(str, self._sites))
        share = 1 - self._computed / self._positions if self._positions else 0.0
        return f"{heads}: saved {self._bytes / 2**20:,.1f} MiB of logits in the last step, {share:.0%} of them ignored"

    @override
    def state_dict(self) -> dict[str, Any]:
        sites = self._saved if self._sites is None else [site.saved for site in self._sites]
        return {"heads": sites}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["heads"]
        self._checked = bool(self._saved)


def _is_apart(module: nn.Module | None) -> bool:
    """Return whether FSDP2 gathers the module's weights only for its own calls."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _few(sites: Sequence[Site]) -> str:
    few = [site for site in sites if site.inputs >= site.classes]
    layers = ", ".join(f"{site} has {site.classes} classes for {site.inputs} features" for site in few)
    return f" Little is gained if logits are smaller than their input: {layers}." if few else ""


def _none_found(look: _Look, maps: Maps, module: nn.Module) -> str:
    """Describe what was found instead of a cross-entropy of a linear layer's output."""
    seen = [f"a cross-entropy that needs the logits: {one}" for one in look.unfit]
    seen += [f"{loss}, whose input does not come from a linear layer that can be followed" for loss in maps.losses]
    if maps.divided:
        seen.append(
            f"products with {', '.join(list(maps.divided)[-3:])}, which tensor parallelism splits, and the loss needs the whole"
            " weight of the output layer (leave that layer out of tensor_parallel_plan)"
        )
    last = list(look.reads.items())[-1:]
    seen += [f"the output of the last linear layer, {site}, is read by {how}" for site, how in last]
    return (
        "found no cross-entropy of a linear layer's output in training_step. Found instead:"
        f" {'; '.join(seen[:4]) or 'no loss call'}.{_compiled(module)} {_MEND}"
    )


def _compiled(module: nn.Module) -> str:
    found = [
        path or "the module"
        for path, m in module.named_modules()
        if m._compiled_call_impl is not None or hasattr(m, "_orig_mod")
    ]
    return f" Compiled: {', '.join(found[:4])}." if found else ""
