"""Compute a score, an embedding and a label of each sample of a data set with an unchanged ``training_step``."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._samples.by_index import losses_of_each_sample
from lightning_eff._core._samples.chosen import share
from lightning_eff._core._samples.scoring import Scorer, Scores
from lightning_eff._core.batches import select
from lightning_eff._core.losses import LossNotVisible, ObserveLosses, check_visible, loss_of
from lightning_eff._core.patches import hook_before, hook_behind
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Around, Proceed, Step
from lightning_eff.data.selection._offline.heads import (
    CalledMaps,
    SeeTargets,
    linear_maps,
    listed,
    named_head,
    own_rows,
)
from lightning_eff.data.selection._offline.scores import el2n, norm_of_map_gradient

_ADVICE = " Give the path of a file of scores, or use score='random'."


class DataScorer(Scorer):
    """Scores samples in one of several ways, and keeps the results in the order of the samples.

    Args:
        who: the technique's name.
        kind: "el2n", "grand", "prototypes", or "labels" for labels only.
        gradients: the parameters of "grand": those of the "head" or "all".
        head: the path of the last linear layer. None finds it.
        labels: whether each sample's class is required. Otherwise it is recorded if it is visible.
    """

    def __init__(self, who: str, kind: str, *, gradients: str, head: str | None, labels: bool) -> None:
        super().__init__(who, None, bounds=True)
        self.kind, self.gradients, self.path, self.wants_labels = kind, gradients, head, labels
        self.values: list[float] = []
        self.embeddings: list[Tensor] = []
        self.labels: list[int] = []
        self._head: nn.Module | None = None

    @property
    def by_sample(self) -> bool:
        """Whether losses are split by sample."""
        return self.kind == "el2n" or (self.kind == "grand" and self.gradients == "head")

    @property
    def needs_head(self) -> bool:
        """Whether the last linear layer must be known."""
        return self.kind == "prototypes" or (self.kind == "grand" and self.gradients == "head")

    @override
    def check_first(
        self, session: Session, step: Step, batch: Any, size: int, again: Callable[[list[int]], Any] | None = None
    ) -> None:
        if not self.by_sample:
            self.checked = True
            return
        try:
            super().check_first(session, step, batch, size, again)
        except LossNotVisible as error:
            raise LossNotVisible(str(error).partition(" Give sample_loss=")[0] + _ADVICE) from None

    @override
    def score(self, step: Step, batch: Any, size: int) -> Scores:
        try:
            if self.needs_head and self._head is None:
                self._head = self._found(step, batch, size)
            targets = SeeTargets(size)
            values = self._values(step, batch, size, targets)
        except LossNotVisible as error:
            return Scores(problem=LossNotVisible(f"{self.who}: {error}{_ADVICE}"))
        except ValueError as error:
            return Scores(problem=error)
        if self.wants_labels and targets.labels is None:
            return Scores(
                problem=ValueError(
                    f"{self.who}(balance=...): the loss got {targets.seen} for {size} samples; expected integers, one class for"
                    " each sample. Use balance=0."
                )
            )
        if not bool(values.isfinite().all()):
            return Scores(
                problem=ValueError(
                    f"{self.who}(score={self.kind!r}): {int((~values.isfinite()).sum())} of {size} samples in batch"
                    f" {step.batch_idx} of the data set have a score that is NaN or infinite. Check these samples, the learning"
                    " rate and the precision."
                )
            )
        self.values += values.tolist()
        self.labels += targets.labels or []
        return Scores(values, values)

    def _values(self, step: Step, batch: Any, size: int, targets: SeeTargets) -> Tensor:
        if self.kind == "grand":
            found = self._of_head if self.gradients == "head" else self._of_all
            return found(step, batch, size, targets).cpu()
        if self.kind == "el2n":
            return self._el2n(step, batch, size, targets).cpu()
        embeddings: list[Tensor] = []

        def note(module: nn.Module, args: Any) -> None:
            if not embeddings:
                embeddings.append(args[0].detach())

        handle = None if self._head is None else hook_before(self._head, note)
        try:
            step.forward_only(batch, size, _under(targets))
        finally:
            if handle is not None:
                handle.remove()
        if handle is not None:
            rows = own_rows(embeddings[0], size) if embeddings else None
            if rows is None:
                raise self._lies_otherwise(embeddings[0] if embeddings else None, size)
            self.embeddings.append(rows.float().mean(dim=1).cpu())
        return torch.zeros(size, dtype=torch.float64)

    # -- losses

    def _el2n(self, step: Step, batch: Any, size: int, targets: SeeTargets) -> Tensor:
        observed = ObserveLosses(size, bounds=True)
        self._check(observed, loss_of(step.forward_only(batch, size, _under(observed, targets))))
        bounds = [call.bounds for call in observed.calls if call.bounds is not None]
        return el2n(bounds, [call.counts for call in observed.calls])

    def _check(self, observed: ObserveLosses, loss: Tensor | None) -> None:
        if loss is None:
            raise ValueError(
                f"{self.who}: training_step returned no loss for a batch of the data set, which leaves its samples without a"
                f" score.{_ADVICE}"
            )
        check_visible(observed, loss)

    def _of_head(self, step: Step, batch: Any, size: int, targets: SeeTargets) -> Tensor:
        head, observed = self._head, ObserveLosses(size)
        assert head is not None
        cut: list[tuple[Tensor, Tensor]] = []
        gradients: list[Tensor] = []

        def cut_off(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            torch.set_grad_enabled(True)  # from here on; the caller, who needs only the loss, restores it
            z = output.detach().requires_grad_()
            cut.append((args[0].detach(), z))
            return z

        def around(run: Callable[[Any], Any], batch: Any) -> Any:
            handle = hook_behind(head, cut_off)
            try:
                with observed, targets:
                    output = run(batch)
            finally:
                handle.remove()
            loss = loss_of(output)
            self._check(observed, loss)
            assert loss is not None
            gradients.extend(torch.autograd.grad(loss, [z for _, z in cut]))
            return output

        step.forward_only(batch, size, around)
        step.chain.cost.backward_passes += 1
        if len(observed.calls) != 1:
            raise ValueError(
                f"{self.who}(score='grand', gradients='head'): training_step made {len(observed.calls)} loss calls, so the"
                " gradients of single samples are unknown. Use gradients='all'."
            )
        call = observed.calls[0]
        # the batch's mean is sum_i s_i / V, a sample's own s_i / n_i
        scale = (call.total / call.counts.clamp(min=1e-12))[:, None, None]
        parts: list[tuple[Tensor, Tensor]] = []
        for (x, _), g in zip(cut, gradients, strict=True):
            rows, own = own_rows(x, size), own_rows(g, size)
            if rows is None or own is None:
                raise self._lies_otherwise(x, size)
            parts.append((rows, own.float() * scale))
        x, g = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return norm_of_map_gradient(x, g, bias=getattr(head, "bias", None) is not None)

    def _of_all(self, step: Step, batch: Any, size: int, targets: SeeTargets) -> Tensor:
        """Run one pass per sample."""
        parameters = [p for p in step.module.parameters() if p.requires_grad]
        norms: list[Tensor] = []
        labels: list[int] = []

        def around(run: Callable[[Any], Any], batch: Any) -> Any:
            own = SeeTargets(1)
            with torch.enable_grad(), own:
                output = run(batch)
                loss = loss_of(output)
                if loss is None:
                    self._check(ObserveLosses(1), loss)
                assert loss is not None, "which has been checked"
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            norms.append(torch.stack([g.double().norm() for g in gradients if g is not None]).norm().detach())
            labels.extend(own.labels or [])
            targets.seen = own.seen
            return output

        for i in range(size):
            step.forward_only(select(batch, torch.tensor([i]), size), 1, around)
            step.chain.cost.backward_passes += 1
        targets.labels = labels if len(labels) == size else None
        return torch.stack(norms)

    # -- the head

    def _found(self, step: Step, batch: Any, size: int) -> nn.Module:
        module: LightningModule = step.module
        if self.path is not None:
            return named_head(module, self.path, who=self.who)
        targets, called = SeeTargets(size), CalledMaps(module)
        try:
            step.forward_only(batch, size, _under(targets))
        finally:
            called.remove()
        head = called.last(targets.classes) if targets.classes else None
        if head is None:
            maps = linear_maps(module)
            # gradients of a layer need a visible loss
            helps = maps and (targets.classes or self.kind == "prototypes")
            way_out = f" Name it with head=, one of {listed(maps)}." if helps else _ADVICE
            raise ValueError(
                f"{self.who}(score={self.kind!r}): found no nn.Linear in {type(module).__name__} that computes the"
                f"{f' {targets.classes}' if targets.classes else ''} logits of a classification loss.{way_out}"
            )
        return head

    def _lies_otherwise(self, x: Tensor | None, size: int) -> ValueError:
        got = "was not called" if x is None else f"got an input of shape {tuple(x.shape)} for {size} samples"
        return ValueError(
            f"{self.who}(score={self.kind!r}): the last linear layer {got}; expected (B, ..., d) with the batch's samples"
            " first. Give the path of another layer with head=."
        )


def look(session: Session, scorer: DataScorer, size: int) -> None:
    """Score one batch on each rank and discard the result, to find errors before the first step.

    Raises:
        ValueError: on all ranks, if the samples cannot be scored.
    """
    loader = session.loaders.latest
    assert loader is not None and loader.chosen is not None
    few = (loader.chosen.batch_size or 1) * session.replicas.count
    losses_of_each_sample(session, scorer, among=range(min(few, size)))
    scorer.values, scorer.embeddings, scorer.labels = [], [], []


def score_all(
    session: Session, scorer: DataScorer, size: int
) -> tuple[Tensor, np.ndarray[Any, Any] | None, Tensor | None]:
    """Compute scores, shape (N,), float64, embeddings, shape (N, d), if needed, and labels, shape (N,).

    They are the same on all ranks. Labels are None if the loss does not get one class per sample.
    """
    scores = losses_of_each_sample(session, scorer)
    own = share(torch.arange(size), session.rank, session.replicas.count, drop_last=False)
    embeddings = labels = None
    parts = session.gather((own, torch.tensor(scorer.labels, dtype=torch.long)))
    if all(len(indices) == len(some) for indices, some in parts):
        labels = torch.zeros(size, dtype=torch.long)
        for indices, some in parts:
            labels[indices] = some
    if scorer.kind == "prototypes":
        mine = torch.cat(scorer.embeddings)
        for indices, some in session.gather((own, mine)):
            if embeddings is None:
                embeddings = np.zeros((size, some.shape[1]), dtype=np.float32)
            embeddings[indices.numpy()] = some.numpy()
    return scores, embeddings, labels


def _under(*modes: AbstractContextManager[Any]) -> Around:
    """Run a step under these modes."""

    def around(run: Proceed, batch: Any) -> Any:
        with ExitStack() as scope:
            for mode in modes:
                scope.enter_context(mode)
            return run(batch)

    return around
