"""A number for each sample of the training data set, found once: of the sample itself, or by its loss, forward only."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_eff._core import rng
from lightning_eff._core._run._silent.unlogged import unlogged
from lightning_eff._core._samples.chosen import share
from lightning_eff._core._samples.counting import current_rule
from lightning_eff._core._samples.scoring import Scorer, agree
from lightning_eff._core.batches import num_samples, tensors
from lightning_eff._core.loaders import ResumableLoader
from lightning_eff._core.patches import Patches
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step, StepChain, in_evaluation, takes_index


def of_each_sample(session: Session, fn: Callable[[Any], float], *, who: str) -> Tensor:
    """``fn(data_set[i])`` of every sample, shape (N,), float64, the same on all ranks, each of which looks at its share.

    The loader's workers fetch the samples. The global random state stays as it is.

    Args:
        session: the run, whose training loader is there.
        fn: of a sample as the data set gives it; where workers fetch them, one that can be pickled.
        who: the technique's name, which keys what the data set draws.

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
    """Every sample's own mean loss, shape (N,), float64, the same on all ranks, each of which runs its share.

    In evaluation mode and in the precision of a training step, by the unchanged ``training_step`` (or by the scorer's
    ``sample_loss``); blocks are shown as in evaluation, and links of techniques take no part. Nothing of it is left in
    logs, buffers, metrics or the global random state. The cost is counted.

    Args:
        session: the run, whose training loader is there.
        scorer: takes the losses apart.
        reference: the module whose losses they are, which is on the run's device meanwhile; None for the run's own.
        among: indices of the samples, of all ranks, whose losses are found; those of others are nan. None for all.

    Raises:
        ValueError: on all ranks, if a loss cannot be taken apart by sample, or is nan or infinite.
    """
    loader = _loader(session)
    own = _own(session, loader, among)
    assert loader.chosen is not None
    problem, values = losses_of(session, scorer, own, loader.chosen.batch_size, reference)
    return put_together(session, own, problem, torch.tensor(values, dtype=torch.float64))


def losses_of(
    session: Session, scorer: Scorer, own: list[int], size: int | None, reference: nn.Module | None = None
) -> tuple[ValueError | None, list[float]]:
    """The mean losses of the samples ``own`` in batches of ``size``, or what is wrong with one of them, of this rank alone.

    As :func:`losses_of_each_sample` finds them, which puts those of all ranks together.
    """
    loader = _loader(session)
    chain, module, with_index = chain_of(session, reference)
    if reference is not None:  # whose losses may lie otherwise than the run's own
        scorer = copy.copy(scorer)
        scorer.checked = False
    with at_hand(session, module), rng.keyed(session.seed, scorer.who, "samples"):
        return _scored(session, loader, own, size, scorer, chain, module, with_index=with_index)


def chain_of(session: Session, reference: nn.Module | None) -> tuple[StepChain, Any, bool]:
    """The unchanged step of the run's module, or of another's, in no links; the module; and whether it takes an index."""
    if reference is None:
        step = session._evaluation(session.apart_step)
        return StepChain(step, cost=session.chain.cost), session.module, takes_index(session.own_step)
    step = getattr(reference, "training_step", _no_step)
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
    """The losses of the samples ``own``, or what is wrong with one of them."""
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
                f"{scorer.who}: the loader's collate_fn made {got} samples of {expected} indices, so it cannot be told which"
                " loss is whose; expected one of each. Give the scores by yourself, or such a collate_fn."
            ), []
        # without gradients from the outside in, so that a plugin sees, too, that nothing is learnt of the pass
        with torch.no_grad(), trainer.precision_plugin.train_step_context(), in_evaluation(module.modules()):
            if got > 1:
                mine = own[len(values) : len(values) + got] if size is not None else None
                scorer.check_first(session, step, batch, got, None if mine is None else _again(session, loader, mine))
            scores = scorer.score(step, batch, got)
        if scores.problem is None and not len(scores.means):
            scores.problem = ValueError(
                f"{scorer.who}: training_step returned no loss of batch {number} of the data set; expected one, by which its"
                " samples are told apart. Give the scores by yourself, or a step that skips none."
            )
        if scores.problem is not None:
            return scores.problem, []
        values += [float(scores.means.mean())] if size is None else scores.means.tolist()
    return None, values


def _again(session: Session, loader: ResumableLoader, own: list[int]) -> Callable[[list[int]], Any]:
    """What makes a batch of some of the samples ``own`` anew, as of graphs, out of which none can be taken."""

    def again(index: list[int]) -> Any:
        some = [own[i] for i in index]
        return next(batches_of(session, _over(loader, some, batch_size=len(some), collate=loader.collate_fn)))

    return again


def _loader(session: Session) -> ResumableLoader:
    loader = session.loaders.latest
    assert loader is not None, "the training loader is taken up before an epoch is chosen"
    return loader


def batches_of(session: Session, loader: Any) -> Iterator[Any]:
    """The batches of a loader as a training step gets them, on the run's device."""
    trainer = session.trainer
    for batch in loader:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = session.module._on_before_batch_transfer(batch, dataloader_idx=0)
        yield trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def batches_by_index(session: Session, own: list[int], size: int) -> Iterator[Any]:
    """Batches of ``size`` of the samples ``own`` of the training data, in their order, as a training step gets them."""
    loader = _loader(session)
    return batches_of(session, _over(loader, own, batch_size=size, collate=loader.collate_fn))


def _own(session: Session, loader: ResumableLoader, among: Sequence[int] | None = None) -> list[int]:
    """This rank's share of the data set's indices, or of those of ``among``, as many as each other rank's."""
    indices = torch.arange(len(loader.dataset)) if among is None else torch.tensor([*among])
    return share(indices, session.rank, session.replicas.count, drop_last=False).tolist()


def _over(loader: ResumableLoader, own: list[int], *, batch_size: int | None, collate: Any) -> Iterator[Any]:
    """What a loader like the user's gives of the samples ``own``, in their order."""
    at_once = (
        batch_size is not None and loader.batch_sampler is None and (loader.chosen is None or loader.chosen.batched)
    )
    return iter(
        DataLoader(
            loader.dataset,
            batch_size=None if at_once else batch_size,  # where the data set fetches a whole batch by its indices
            sampler=BatchSampler(own, batch_size, drop_last=False) if at_once and batch_size else own,
            collate_fn=collate,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )
    )


def put_together(session: Session, own: list[int], problem: ValueError | None, values: Tensor) -> Tensor:
    """The values of all ranks, by index, or the same error on all; nan where no rank has one."""
    found = torch.full((len(_loader(session).dataset),), torch.nan, dtype=torch.float64)
    for indices, some in agree(session, problem, (own, values)):
        found[torch.tensor(indices, dtype=torch.long)] = some
    return found


@contextmanager
def at_hand(session: Session, module: nn.Module) -> Iterator[None]:
    """``module`` is on the run's device and in the run's trainer, where it logs nothing; afterwards it is as it was."""
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
            if "_trainer" in vars(own):  # a LightningModule of either name
                scope.callback(vars(own).__setitem__, "_trainer", vars(own)["_trainer"])
                vars(own)["_trainer"] = session.trainer
        patches = Patches()
        scope.callback(patches.restore)
        if hasattr(module, "_trainer"):
            patches.set(module, "log", _ignore)
            scope.enter_context(unlogged(module))
        yield


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stands in for ``log`` of a module that is asked for its losses alone."""


def _no_step(batch: Any, batch_idx: int) -> None:
    """Stands for the step of a module that has none, and whose losses a function of the user's tells."""
