"""Masks that follow from derivatives of the loss before the first step, and stay."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._architecture.updates import without_updates
from lightning_eff._core._branches.sharded_step import step_of
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.batches import map_tensors
from lightning_eff._core.passes import training_batches
from lightning_eff._core.search_space import SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model._derivatives.passes import differentiable, unshortened
from lightning_eff.model.sparsity._masks.finding import largest
from lightning_eff.model.sparsity._masks.masked import Masked, agreed, no_time
from lightning_eff.model.sparsity._random_mask import fixed

#: For ``conflicts``: techniques that leave weights without a gradient before the first step.
ZEROS: Mapping[str, str] = dict.fromkeys(
    ("Fixup", "ReZero", "SkipInit", "ZerO", "ZeroProjections"),
    "weights before layers of zeros have no gradient at the start, so they have no score",
)


@contextmanager
def _as_in_training(module: nn.Module) -> Iterator[None]:
    """Let BatchNorm normalise by the batch until the context ends."""
    norms = [(m, m.training) for m in module.modules() if isinstance(m, _BatchNorm)]
    try:
        for m, _ in norms:
            m.training = True
        yield
    finally:
        for m, training in norms:
            m.training = training


class Scored(Masked):
    """A technique that scores each weight before the first step, and keeps the best of all weights together.

    The module's own step runs outside the training run and leaves no trace: in float32, without dropout, and with BatchNorm
    normalising by the batch. Gradients are means over batches and ranks. Under manual optimization, they are those with which
    each optimizer would step, and the weights of each optimizer are compared separately, because losses differ.

    Attributes:
        batches: the number of batches for the scores, on each rank.
    """

    batches: int
    saves = "no time on today's hardware: it trains a sparse network in one training"
    search_space = SearchSpace({"sparsity": Uniform(0.5, 0.9)}, no_time)
    control = Control("a fixed random mask of the same size", fixed)

    @abstractmethod
    def scores(self, session: Session, data: Sequence[Any], batch_idx: int) -> dict[str, Tensor] | None:
        """A score for each element of each weight, larger is better; the mean over ranks counts.

        None if the step skips one of the batches.
        """

    @override
    def begin(self, session: Session, batch: Any, batch_idx: int) -> dict[str, Tensor] | None:
        if self.batches == 1:
            data = [batch]
        else:
            with closing(training_batches(session, self.batches, epoch=0)) as every:
                data = list(every)
        data = [map_tensors(one, unshortened) for one in data]
        with (
            rng.keyed(session.seed, type(self).__name__, session.rank),
            differentiable(session),
            _as_in_training(session.module),
        ):
            found = self.scores(session, data, batch_idx)
        if found is None:
            return None
        masks: dict[str, Tensor] = {}
        for names in self.together():
            scores = torch.cat([found[name].flatten() for name in names])
            count = max(round((1.0 - self.sparsity) * scores.numel()), 1)
            parts = largest(scores, count).split([self.weights[name].numel for name in names])
            masks |= {name: part.view(self.weights[name].shape) for name, part in zip(names, parts, strict=True)}
        return {name: masks[name] for name in self.weights}

    def loss(self, session: Session, batch: Any, batch_idx: int, passes: int) -> Tensor | None:
        """The loss of the module's own step, to be differentiated ``passes`` times; None for a skipped batch."""
        output = step_of(session, batch, batch_idx)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        session.chain.cost.add(batch, backward=passes)
        if loss is not None and (not isinstance(loss, Tensor) or loss.grad_fn is None):
            raise ValueError(
                f"{type(self).__name__}: training_step returned {type(loss).__name__} without a graph, so weights have no"
                " score. Return a loss with gradients, or remove the callback."
            )
        return loss

    def gradients(self, session: Session, data: Sequence[Any], batch_idx: int) -> dict[str, Tensor] | None:
        """The mean gradient of each weight over batches and ranks; None if the step skips one of the batches.

        Raises:
            ValueError: if a weight, or an expert of one, has no gradient.
        """
        total = on_all_ranks(session, lambda: self._own_gradients(session, data, batch_idx))
        if any(session.gather(not total)):
            return None
        means = {name: agreed(session, g) for name, g in total.items()}
        self._check_seen(session, means)
        return means

    def _own_gradients(self, session: Session, data: Sequence[Any], batch_idx: int) -> dict[str, Tensor]:
        """This rank's means; empty if the step skips a batch."""
        if not session.module.automatic_optimization:
            return self.over_steps(session, data, batch_idx, self._given)
        total = {name: torch.zeros_like(self.parameter(name)) for name in self.weights}
        missed = False
        for batch in data:
            loss = self.loss(session, batch, batch_idx, 1)
            missed |= loss is None
            if loss is not None:
                parameters = [self.parameter(name) for name in total]
                for name, g in zip(total, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                    total[name] += torch.zeros_like(total[name]) if g is None else g / len(data)
        return {} if missed else total

    def over_steps(
        self,
        session: Session,
        data: Sequence[Any],
        batch_idx: int,
        found: Callable[[list[str]], Mapping[str, Tensor]],
        *,
        passes: int = 1,
        backward: Callable[..., None] | None = None,
    ) -> dict[str, Tensor]:
        """The mean of tensors of weights over the steps that optimizers would make on these batches.

        Args:
            session: the run, under manual optimization.
            data: the batches.
            batch_idx: the index of the first one.
            found: returns the tensors of an optimizer's weights, given their names, in place of its step.
            passes: the number of backward passes per batch, for the cost.
            backward: replaces ``manual_backward``, see :func:`without_updates`.
        """
        total = {name: torch.zeros_like(self.parameter(name)) for name in self.weights}
        steps = dict.fromkeys(total, 0)

        def stepping(optimizer: Optimizer) -> None:
            for name, value in found(self.names_of(optimizer)).items():
                total[name] += value.detach()
                steps[name] += 1

        with without_updates(session.module, stepping, backward):
            for i, batch in enumerate(data):  # a module may step an optimizer every few batches
                step_of(session, batch, batch_idx + i)
                session.chain.cost.add(batch, backward=passes)
        return {name: value / max(steps[name], 1) for name, value in total.items()}

    def _given(self, names: list[str]) -> dict[str, Tensor]:
        return {name: g for name in names if (g := self.parameter(name).grad) is not None}

    def _check_seen(self, session: Session, gradients: Mapping[str, Tensor]) -> None:
        """Raise ``ValueError`` if a weight has no gradient."""
        unseen: list[str] = []
        for name, g in gradients.items():
            parts = g.flatten(1) if self.weights[name].stack else g.reshape(1, -1)
            empty = [i for i, some in enumerate(parts.any(1).tolist()) if not some]
            unseen += [f"{name}[{i}]" if self.weights[name].stack else name for i in empty]
        if unseen:
            where = "on" if session.module.automatic_optimization else "in an optimizer's step on"
            raise ValueError(
                f"{type(self).__name__}(batches={self.batches}): {len(unseen)} weights have no gradient {where} these batches,"
                f" such as {unseen[0]}, and would be pruned completely. Give more batches, or leave them out with dense=[...];"
                " no weight has changed."
            )

    @override
    def asked(self) -> dict[str, Any]:
        return {"sparsity": self.sparsity, "batches": self.batches}
