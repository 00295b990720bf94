"""Compute a number for each sample of the training data set once, from the sample itself or its loss."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_eff._core import rng
from lightning_eff._core._run._muting.null_loggers import unlogged
from lightning_eff._core._samples.chosen import share
from lightning_eff._core._samples.counting import current_rule
from lightning_eff._core._samples.handed import Handed
from lightning_eff._core._samples.scoring import Scorer, agree
from lightning_eff._core.batches import num_samples, tensors
from lightning_eff._core.loaders import ResumableLoader
from lightning_eff._core.patches import Patches
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step, StepChain, in_evaluation, takes_index


def of_each_sample(session: Session, fn: Callable[[Any], float], *, who: str) -> Tensor:
    """Compute ``fn(data_set[i])`` of every sample, shape (N,), float64, the same on all ranks, which share the work.

    The loader's workers fetch the samples. The global random state stays as it is.

    Args:
        session: the run, with its training loader.
        fn: a function of a sample as the data set returns it. It must be picklable if workers fetch the samples.
        who: the technique's name, which keys the data set's random draws.

    Raises:
        ValueError: on all ranks, if ``fn`` raises it on one.
    """
    loader, problem, values = _loader(session), None, []
    own = _own(session, loader)
    with rng.keyed(session.seed, who, "samples"):
        try:
            values = [float(value) for value in _over(loader, own, batch_size=None, collate=fn)]
        except ValueError as error:
            problem = error
    return put_together(session, own, problem, torch.tensor(values, dtype=torch.float64))


def losses_of_each_sample(
    session: Session, scorer: Scorer, reference: nn.Module | None = None, *, among: Sequence[int] | None = None
) -> Tensor:
    """Compute every sample's own mean loss, shape (N,), float64, the same on all ranks, which share the work.

    It runs the unchanged ``training_step`` (or the scorer's ``sample_loss``) in evaluation mode and in the precision of a
    training step, without other techniques. Logs, buffers, metrics and the global random state stay as they were. The cost is
    counted.

    Args:
        session: the run, with its training loader.
        scorer: splits losses by sample.
        reference: the module whose losses to compute, moved to the run's device meanwhile. None takes the run's own.
        among: the indices of the samples to score, over all ranks. Others are NaN. None scores all.

    Raises:
        ValueError: on all ranks, if a loss cannot be split by sample, or is NaN or infinite.
    """
    loader = _loader(session)
    own = _own(session, loader, among)
    assert loader.chosen is not None
    problem, values = losses_of(session, scorer, own, loader.chosen.batch_size, reference)
    return put_together(session, own, problem, torch.tensor(values, dtype=torch.float64))


def losses_of(
    session: Session, scorer: Scorer, own: list[int], size: int | None, reference: nn.Module | None = None
) -> tuple[ValueError | None, list[float]]:
    """Compute the mean losses of this rank's samples ``own`` in batches of ``size``, or the first error.

    :func:`losses_of_each_sample` combines the results of all ranks.
    """
    loader = _loader(session)
    chain, module, with_index = chain_of(session, reference)
    if reference is not None:  # its losses may have another order than the run's own
        scorer = copy.copy(scorer)
        scorer.checked = False
    with at_hand(session, module), rng.keyed(session.seed, scorer.who, "samples"):
        return _scored(session, loader, own, size, scorer, chain, module, with_index=with_index)


def chain_of(session: Session, reference: nn.Module | None) -> tuple[StepChain, Any, bool]:
    """Return a chain without links around the unchanged step, its module, and whether the step takes a batch index."""
    if reference is None:
        step = session._evaluation(session.apart_step)
        return StepChain(step, cost=session.chain.cost), session.module, takes_index(session.own_step)
    step = Handed(type(reference).__name__).around(getattr(reference, "training_step", _no_step))
    return StepChain(step, cost=session.chain.cost), reference, takes_index(step)


def _scored(
    session: Session,
    loader: ResumableLoader,
    own: list[int],
    size: int | None,
    scorer: Scorer,
    chain: StepChain,
    module: LightningModule,
    *,
    with_index: bool,
) -> tuple[ValueError | None, list[float]]:
    """Compute the losses of the samples ``own``, or the first error."""
    trainer, values = session.trainer, list[float]()
    for number, batch in enumerate(batches_of(session, _over(loader, own, batch_size=size, collate=loader.collate_fn))):
        step = Step(chain, module, (number,) if with_index else (), number, trainer.global_step, asking=scorer.who)
        expected = None if size is None else min(size, len(own) - len(values))
        if (rule := current_rule()) is not None:
            rule.learn(tensors(batch), expected)
        got = num_samples(batch)
        expected = expected or got
        if got != expected:
            return ValueError(
                f"{scorer.who}: the loader's collate_fn made {got} samples of {expected} indices, so losses cannot be assigned"
                " to samples. Give your own scores, or a collate_fn that makes one sample of each index."
            ), []
        # no_grad is outermost, so that a plugin also sees that the pass needs no gradients
        with torch.no_grad(), trainer.precision_plugin.train_step_context(), in_evaluation(module.modules()):
            if got > 1:
                mine = own[len(values) : len(values) + got] if size is not None else None
                scorer.check_first(session, step, batch, got, None if mine is None else _again(session, loader, mine))
            scores = scorer.score(step, batch, got)
        if scores.problem is None and not len(scores.means):
            scores.problem = ValueError(
                f"{scorer.who}: training_step returned no loss for batch {number} of the data set, so its samples have no"
                " score. Give your own scores, or a training_step that skips no batch."
            )
        if scores.problem is not None:
            return scores.problem, []
        values += [float(scores.means.mean())] if size is None else scores.means.tolist()
    return None, values


def _again(session: Session, loader: ResumableLoader, own: list[int]) -> Callable[[list[int]], Any]:
    """Return a function that makes a batch of some of the samples ``own`` again, for batches that cannot be indexed."""

    def again(index: list[int]) -> Any:
        some = [own[i] for i in index]
        return next(batches_of(session, _over(loader, some, batch_size=len(some), collate=loader.collate_fn)))

    return again


def _loader(session: Session) -> ResumableLoader:
    loader = session.loaders.latest
    assert loader is not None, "the training loader is known before an epoch is chosen"
    return loader


def batches_of(session: Session, loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader as a training step gets them, on the run's device."""
    trainer = session.trainer
    for batch in loader:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = session.module._on_before_batch_transfer(batch, dataloader_idx=0)
        yield trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def batches_by_index(session: Session, own: list[int], size: int) -> Iterator[Any]:
    """Yield batches of ``size`` of the training samples ``own`` in their order, as a training step gets them."""
    loader = _loader(session)
    return batches_of(session, _over(loader, own, batch_size=size, collate=loader.collate_fn))


def _own(session: Session, loader: ResumableLoader, among: Sequence[int] | None = None) -> list[int]:
    """Return this rank's part of the data set's indices, or of ``among``, with the same number on each rank."""
    indices = torch.arange(len(loader.dataset)) if among is None else torch.tensor([*among])
    return share(indices, session.rank, session.replicas.count, drop_last=False).tolist()


def _over(loader: ResumableLoader, own: list[int], *, batch_size: int | None, collate: Any) -> Iterator[Any]:
    """Iterate over the samples ``own`` in their order, with a loader like the user's."""
    at_once = (
        batch_size is not None and loader.batch_sampler is None and (loader.chosen is None or loader.chosen.batched)
    )
    return iter(
        DataLoader(
            loader.dataset,
            batch_size=None if at_once else batch_size,  # the data set fetches a whole batch by its indices
            sampler=BatchSampler(own, batch_size, drop_last=False) if at_once and batch_size else own,
            collate_fn=collate,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )
    )


def put_together(session: Session, own: list[int], problem: ValueError | None, values: Tensor) -> Tensor:
    """Combine the values of all ranks by index (NaN for none), or raise the same error on all."""
    found = torch.full((len(_loader(session).dataset),), torch.nan, dtype=torch.float64)
    for indices, some in agree(session, problem, (own, values)):
        found[torch.tensor(indices, dtype=torch.long)] = some
    return found


@contextmanager
def at_hand(session: Session, module: nn.Module) -> Iterator[None]:
    """Move ``module`` to the run's device and trainer without logging, and restore it afterwards."""
    if module is session.module:
        with session.together():
            yield
        return
    with ExitStack() as scope:
        first = next(module.parameters(), None)
        if first is not None:
            scope.callback(module.to, first.device)
            module.to(session.trainer.strategy.root_device)
        for own in module.modules():
            if "_trainer" in vars(own):  # a LightningModule of either package
                scope.callback(vars(own).__setitem__, "_trainer", vars(own)["_trainer"])
                vars(own)["_trainer"] = session.trainer
        patches = Patches()
        scope.callback(patches.restore)
        if hasattr(module, "_trainer"):
            patches.set(module, "log", _ignore)
            scope.enter_context(unlogged(module))
        yield


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Replace ``log`` of a module that only computes losses."""


def _no_step(batch: Any, batch_idx: int) -> None:
    """Replace the missing step of a module whose losses come from the user's function."""
