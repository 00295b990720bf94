"""The last linear map and its cross-entropy in one, on the positions that count (Izsak et al. 2021; Hsu et al. 2024)."""

import sys
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core._stack.compiled import uncompiled
from lightning_eff._core.batches import num_samples
from lightning_eff._core.losses import LossNotVisible, loss_of
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._head.calls import Node
from lightning_eff.data.tokens._head.finding import Maps, Site, Window, reader, site_at
from lightning_eff.data.tokens._head.loss import fused_loss

WHO = "FusedLinearCrossEntropy"
_MEND = (
    "Let the loss be F.cross_entropy (or nn.CrossEntropyLoss, or Hugging Face's own) of the output of an nn.Linear, or of a"
    " product with a parameter, outside of compiled modules; or take the technique out."
)


class _Look:
    """Which maps' outputs reach a cross-entropy, in one pass.

    Attributes:
        found: the maps, by what tells them from others.
        reads: by the map, what its output was computed for first.
        unfit: cross-entropies of maps that cannot be computed without logits.
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


def _pointless(profile: RunProfile) -> str | None:
    return "samples are no sequences, so the head has few rows" if profile.sequence_length is None else None


class FusedLinearCrossEntropy(Technique):
    """Make the module's last linear map and its cross-entropy one: the logits never exist, ignored positions cost nothing.

    Logits are positions times vocabulary: with 128k classes they, their softmax and their gradient are most of a language
    model's memory. Here a few rows of them are computed at a time, together with the gradients, which are added up
    (``kernels/linear_cross_entropy.py``). Positions whose label is ``ignore_index``, or that never reach the loss, are not
    computed at all: of a masked language model that is 85 % of the head. Loss and gradients are those of plain training
    but for the rounding of sums; in bfloat16 they are nearer the exact ones.

    The head is found in the first batch, in a forward pass that is counted and in which no logits are made either: it is
    each ``nn.Linear``, or product with a parameter (``F.linear(x, self.embed.weight)``), whose output reaches
    ``F.cross_entropy`` (or ``F.nll_loss`` through ``log_softmax``), by whatever name and from whatever library, Hugging Face's
    losses too. Shifts, reshapes, transpositions, selections by masks, casts up, scales by a number, a bias of classes and
    caps by ``tanh`` may lie between. Tied weights, several heads and several losses are fine. ``ignore_index``,
    ``label_smoothing``, ``reduction`` and class weights (without smoothing) are those of the call.

    What the head returns in a training step stands in for the logits. All else that is done with it, such as a metric,
    gets the logits, which are computed then, and a note says so; where they are read in each step, that costs the map's
    forward pass again. A cross-entropy with probabilities as targets is computed of the logits. Evaluation is plain.

    A head of few classes gains nothing, which is told; :attr:`min_classes` leaves it alone. Of a small masked language model
    with 8,256 classes, most of a step is saved (docs/evidence.md), as by ModernBERT's own ``sparse_prediction``, where a
    module uses that.

    Logged: ``rows`` that the last step computed, ``ignored_share`` of its positions, ``logits_bytes`` that plain logits
    would have taken, and ``reads``, how often in the step something else asked for them.

    Args:
        rows: of logits at a time, >= 1; None for 1024 on a GPU and 256 elsewhere, and no more than a quarter of them.
        min_classes: heads with fewer classes stay as they are, >= 2; ``math.inf`` is plain training.

    Raises:
        ValueError: if an argument is out of its range; at setup, under manual optimization; at the first batch, before any
            weight has changed and on all ranks, if no cross-entropy of a linear map's output is seen, or none that can be
            computed without logits.
        RuntimeError: if the head's input is changed in place before the loss, or its gradients are differentiated.

    Sources:
        Izsak et al. 2021, arXiv:2104.07705 (sparse token prediction); Hsu et al. 2024, arXiv:2410.10989 (Liger).
    """

    saves: ClassVar[str] = "the logits' memory, and the head's time on positions that are not predicted"
    paper: ClassVar[str] = "Izsak et al. 2021, arXiv:2104.07705; Hsu et al. 2024, arXiv:2410.10989"
    constraints: ClassVar[str] = (
        "automatic optimization; F.cross_entropy of a linear map's output, outside of compiled modules; gradients that are"
        " not differentiated themselves"
    )
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    survey: ClassVar[Survey | None] = Survey("token masking (sparse token prediction)", zhuang="2.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        pointless=_pointless, measured_on=lambda profile: profile.masked_labels
    )
    sparse_gradients: ClassVar[bool] = True
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds: loss and gradients are the same but for rounding, so what counts is time and"
        " memory"
    )
    conflicts: ClassVar = {
        "KFAC": "its factors are made of the gradients at each map's output, for which the logits must be there"
    }

    def __init__(self, *, rows: int | None = None, min_classes: float = 2) -> None:
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ValueError(f"{WHO}({rows=}): expected an integer >= 1, rows of logits at a time, or None.")
        if isinstance(min_classes, bool) or not isinstance(min_classes, int | float) or not min_classes >= 2:
            raise ValueError(
                f"{WHO}({min_classes=}): expected a number >= 2; heads with fewer classes stay as they are, and"
                " math.inf is plain training."
            )
        self.rows = rows
        self.min_classes = min_classes
        self._reset()

    def _reset(self) -> None:
        self._sites: list[Site] | None = None
        self._saved: list[list[Any]] = []  # the heads of a checkpoint, until its run goes on
        self._window: Window | None = None
        self._checked = False
        self._told: set[tuple[str, str]] = set()
        self._first_read = ""
        self._begin()

    def _begin(self) -> None:
        self._calls = self._computed = self._positions = self._bytes = self._reads = 0

    @property
    @override
    def neutral(self) -> bool:
        return self.min_classes == float("inf")

    @override
    def attach(self, session: Session) -> None:
        self._reset()
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
        """The step is over: what is still held of the logits is computed, before weights move."""
        if sys.exc_info()[0] is None:
            for node in [node for node in self.nodes if node.held]:
                node.value()
        self.nodes.clear()
        if self._window is not None:
            self._window.close()

    # -- the maker of stand-ins

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
        if (str(node.call.site), where) not in self._told:
            self._told.add((str(node.call.site), where))
            rank_zero_info(f"{WHO}: the logits of {node.call.site} are also read by {where}, and computed for it.")

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
            # what any rank has seen, so that a checkpoint is of all
            different = dict.fromkeys(tuple(saved) for found in every for saved in found)
            sites = self._sites = [site_at(step.module, *saved) for saved in different]
            self._window = Window(step.module, self, sites)
            told = ", ".join(f"{site} ({site.classes:,} classes)" for site in sites)
            rank_zero_info(f"{WHO}: the loss is computed without the logits of {told}.{_few(sites)}")

    def _look(self, step: Step, batch: Any) -> list[list[Any]] | None:
        """The heads, as checkpoints hold them, or None where the step skips this batch."""
        try:
            look, maps, output = self._pass(step, batch, graph=False)
        except RuntimeError:  # a step that takes gradients by itself
            look, maps, output = self._pass(step, batch, graph=True)
        found = list(look.found.values())
        heads = [site for site in found if site.classes >= self.min_classes]
        for site in heads:
            if _is_apart(site.module):
                raise ValueError(
                    f"{WHO}: fully_shard was applied to {site} itself, so its weight is whole only while it is called, and the"
                    f" loss multiplies with it later. Leave it to the root's fully_shard, or remove {WHO}."
                )
        if heads:
            return [site.saved for site in heads]
        if loss_of(output) is None:
            return None
        if found:
            left = ", ".join(f"{site} has {site.classes}" for site in found)
            raise LossNotVisible(
                f"{WHO}(min_classes={self.min_classes}): {left}, and no other head was found; expected one with at least"
                " as many classes. Lower min_classes, or take the technique out."
            )
        raise LossNotVisible(f"{WHO}: {_none_found(look, maps, step.module)}")

    def _pass(self, step: Step, batch: Any, *, graph: bool) -> tuple[_Look, Maps, Any]:
        """A pass of the user's step that changes nothing, with stand-ins for what all its linear maps return."""
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
            why = f" They were read by {self._first_read} instead." if self._first_read else ""
            problem = LossNotVisible(
                f"{WHO}: no cross-entropy of the logits of {heads} could be computed without them in the first training"
                f" step; expected one.{why}{_compiled(step.module)} What runs without a gradient, as within a checkpoint"
                f" with use_reentrant=True, is not followed. {_MEND}"
            )
        self._checked = all(agree(self.session, problem, ready))

    # -- what it tells

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
            return "no step taken"
        heads = ", ".join(map(str, self._sites))
        share = 1 - self._computed / self._positions if self._positions else 0.0
        return f"{heads}: {self._bytes / 2**20:,.1f} MiB of logits never made in the last step, {share:.0%} of them ignored"

    @override
    def state_dict(self) -> dict[str, Any]:
        sites = self._saved if self._sites is None else [site.saved for site in self._sites]
        return {"heads": sites}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["heads"]
        self._checked = bool(self._saved)


def _is_apart(module: nn.Module | None) -> bool:
    """Whether FSDP2 puts the module's weights together for its calls alone."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _few(sites: Sequence[Site]) -> str:
    few = [site for site in sites if site.inputs >= site.classes]
    told = ", ".join(f"{site} has {site.classes} classes for {site.inputs} features" for site in few)
    return f" Little is gained where logits are smaller than what they are made of: {told}." if few else ""


def _none_found(look: _Look, maps: Maps, module: nn.Module) -> str:
    """What was seen instead of a cross-entropy of a linear map's output."""
    seen = [f"a cross-entropy that needs the logits: {one}" for one in look.unfit]
    seen += [f"{loss}, whose input no linear map that can be followed has made" for loss in maps.losses]
    if maps.divided:
        seen.append(
            f"products with {', '.join(list(maps.divided)[-3:])}, which tensor parallelism splits, and the loss needs a head's"
            " whole weight (leave the head out of tensor_parallel_plan)"
        )
    last = list(look.reads.items())[-1:]
    seen += [f"the output of {site}, the last map, read by {how}" for site, how in last]
    return (
        "no cross-entropy in training_step was seen whose input is what a linear map returned; expected one. Seen:"
        f" {'; '.join(seen[:4]) or 'no loss call'}.{_compiled(module)} {_MEND}"
    )


def _compiled(module: nn.Module) -> str:
    found = [
        path or "the module"
        for path, m in module.named_modules()
        if m._compiled_call_impl is not None or hasattr(m, "_orig_mod")
    ]
    return f" Compiled here: {', '.join(found[:4])}." if found else ""
