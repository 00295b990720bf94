"""RHO-LOSS: train on the samples whose loss can still fall most (Mindermann et al. 2022, arXiv:2206.07137)."""

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Number
from lightning_eff._core._arguments.objects import FilePath, Instance, PerSample
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scores, agree
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._choosing import Choosing, largest, others, random_subset
from lightning_eff.data.selection._counting import Keep
from lightning_eff.data.selection._irreducible import irreducible_losses


def reducible(losses: Tensor, irreducible: Tensor) -> Tensor:
    """Compute the reducible holdout loss ``l_i - l_i^IL``, both of shape (B,), in float64."""
    return losses.double() - irreducible.double()


def _random_subset(technique: "RHOLoss") -> Mapping[str, Callback]:
    return random_subset(technique.keep)


def _pointless(profile: RunProfile) -> str | None:
    if profile.epochs < 2:
        return "the run goes over its data fewer than two times, as do the passes that find irreducible losses"
    return needs_samples(profile)


class RHOLoss(Choosing):
    """Train on the samples of each batch whose loss can still fall most.

    The reducible loss of a sample is its loss now, from a forward pass without gradients, minus its irreducible loss: the loss
    under a model that learned from other samples. It is small for samples that are learned already and for samples that cannot
    be learned, such as wrong labels. The module's own ``training_step`` runs on the ``round(keep * B)`` samples with the
    largest reducible loss (at least one). Their mean loss is not reweighted.

    Irreducible losses belong to data set indices. Give them as ``irreducible``, or let the run compute them before its first
    step. It then trains a model on one random half of the training data to score the other half, and the other way round, as
    in the paper's variant without holdout data. The model is the module itself, which gets its initial weights back
    afterwards, or a smaller ``model``. This costs ``epochs`` passes over the data and a forward pass, which count towards the
    run's time and its report. After a fit, the attribute ``irreducible_losses`` holds them for ``torch.save``. Checkpoints
    hold them too, so a resumed run does not compute them again.

    Use it for several epochs over noisy or redundant data. Random augmentation and masking make a different sample of the same
    index each time, while its irreducible loss comes from one draw. Micro-batches of an accumulation window and ranks are
    handled separately.

    ``training_step`` must return a sum of mean-reduced losses from ``torch.nn.functional`` (or ``torch.nn``), with one row
    or one group of consecutive rows per sample. The first batch is checked. For any other loss, give ``sample_loss``.

    It logs ``active`` (whether the last step chose samples), ``fraction`` (the fraction of the batch that was used) and
    ``irreducible_loss`` (the mean over the data set).

    Args:
        keep: the fraction of each batch to train on. 0.1 is the paper's, 1 is plain training.
        irreducible: one irreducible loss per sample of the data set, in the order of the indices, shape (N,), or the path of a
            tensor that ``torch.save`` wrote. None computes them.
        model: a LightningModule whose ``training_step`` takes the same batches, to compute irreducible losses in place of the
            module.
        epochs: the number of passes over each half of the data to train that model.
        lr: the learning rate of the AdamW that trains it. It decays to 0 linearly.
        sample_loss: a function of (module, batch) that returns one loss per sample, shape (B,). It is used only to choose
            samples and to compute irreducible losses.

    Raises:
        ValueError: for a value out of range. When training starts, if the loader does not say which samples a batch has (for
            example over an IterableDataset) or the number of irreducible losses is wrong. At the first step, on all ranks, if
            the loss of a sample cannot be seen, a batch has one sample, or it does not have one sample per index. At any step,
            if a loss is NaN or infinite.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[RHOLoss(keep=0.25, epochs=2)])

    References:
        Mindermann et al. 2022, "Prioritized Training on Points that are Learnable, Worth Learning, and Not Yet Learnt",
        arXiv:2206.07137. Kaddour et al. 2023, "No Train No Gain", arXiv:2307.06440, find no gain for the same training time.
    """

    saves = "backward passes: only the samples whose loss can still fall are trained on"
    paper = "Mindermann et al. 2022, arXiv:2206.07137"
    constraints = (
        "needs a DataLoader over a map-style data set, a mean loss of torch.nn.functional, or sample_loss=, "
        "and several epochs"
    )
    needs: ClassVar[Need] = Need.WHOLE
    search_space = SearchSpace({"keep": Choice((0.1, 0.25, 0.5)), "epochs": Choice((1, 3))}, _pointless)
    control = Control("as many samples drawn at random, without scoring", _random_subset)
    conflicts: ClassVar[Mapping[str, str]] = others("RHOLoss")
    neutral_at: ClassVar[Mapping[str, Any]] = {"keep": 1}
    checkpointed = ("irreducible_losses",)

    def __init__(
        self,
        keep: Keep = 0.1,
        *,
        irreducible: Annotated[
            str | os.PathLike[str] | Sequence[float] | Tensor, Either(PerSample(torch.float32), FilePath())
        ]
        | None = None,
        model: Annotated[LightningModule, Instance("a LightningModule", (LightningModule,))] | None = None,
        epochs: Annotated[int, Count()] = 1,
        lr: Annotated[float, Number(above=0)] = 1e-3,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        if model is not None and irreducible is not None:
            raise ValueError(
                f"RHOLoss(irreducible=..., model={type(model).__name__}(...)): both give the irreducible losses. Give one of"
                " them."
            )
        self.keep, self.model, self.epochs, self.lr, self.sample_loss = keep, model, epochs, lr, sample_loss
        path = irreducible if isinstance(irreducible, str | os.PathLike) else None
        self.given: Tensor | None = _read(path) if path is not None else irreducible  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def _reset(self) -> None:
        super()._reset()
        self.irreducible_losses: Tensor | None = self.given

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        session.loaders.told_to = session.loaders.told_to or "RHOLoss"

    @override
    def on_model(self, session: Session) -> None:
        if self.given is None and is_checkpointed_reentrantly((self.model or session.module).modules()):
            raise ValueError(
                "RHOLoss: the module's blocks are checkpointed with use_reentrant=True, but the irreducible model's gradients"
                " come from torch.autograd.grad. Set use_reentrant=False, or give irreducible=."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.neutral:
            return
        samples, held = self.session.loaders.num_samples, self.irreducible_losses
        if samples is None:
            raise ValueError(
                "RHOLoss: the training loader does not say which samples a batch has, but irreducible losses belong to samples."
                " Use one DataLoader over a data set with __getitem__ and __len__, or use OrderedSGD instead."
            )
        if held is not None and len(held) != samples:
            raise ValueError(
                f"RHOLoss: got {len(held):,} irreducible losses for a data set of {samples:,} samples; expected one per sample."
                " Give the losses of this data set, or irreducible=None to compute them."
            )
        if samples < 2 * self.session.replicas.count and held is None:
            raise ValueError(
                f"RHOLoss: got a data set of {samples} sample(s); expected at least two per process to split it into halves."
                " Give irreducible=."
            )

    @override
    def share(self, step: Step) -> float:
        return self.keep

    @override
    def score(self, step: Step, batch: Any, size: int) -> Scores:
        problem = self._unknown(step, size)
        if self.irreducible_losses is None:  # the same on all ranks
            (size_of_all, *_) = agree(self.session, problem, size)
            self.irreducible_losses = irreducible_losses(
                self.session, self._scorer, self.model, size=size_of_all, epochs=self.epochs, lr=self.lr
            ).float()
            cost = self.session.chain.cost
            rank_zero_info(
                f"RHOLoss: computed the irreducible losses of {len(self.irreducible_losses):,} samples (mean"
                f" {float(self.irreducible_losses.mean()):.4g}) in {cost.seconds:.1f} s of extra passes"
            )
        return Scores(problem=problem) if problem is not None else super().score(step, batch, size)

    def _unknown(self, step: Step, size: int) -> ValueError | None:
        """The error if the loader's indices of this batch are unknown, or are not one integer per sample."""
        indices = step.indices
        if indices is not None and len(indices) == size and all(isinstance(i, int) for i in indices):
            return None
        if indices is None:
            return ValueError(
                f"RHOLoss: it is not known which samples a batch has, because {self.session.loaders.why_unknown}. Use a"
                " torch.utils.data.DataLoader over a data set with __getitem__ and __len__, or use OrderedSGD instead."
            )
        return ValueError(
            f"RHOLoss: the loader gave {len(indices)} indices for a batch of {size} samples; expected one integer per sample."
            " Give the loader a batch_size and a collate_fn that makes one sample of each index."
        )

    @override
    def train(self, step: Step, batch: Any, proceed: Proceed, scores: Scores, size: int, k: int) -> Any:
        assert self.irreducible_losses is not None and step.indices is not None
        rho = reducible(scores.means, self.irreducible_losses[torch.tensor(step.indices)])
        return proceed(step.pick(batch, largest(rho, k=k), size))

    # -- report and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        held = self.irreducible_losses
        return {**super().report(), **({} if held is None else {"irreducible_loss": held.mean()})}


def _read(path: str | os.PathLike[str]) -> Tensor:
    """Read the irreducible losses that ``torch.save`` wrote.

    Raises:
        ValueError: if they are not one finite number per sample, or the file cannot be read.
    """
    who, mend = f"RHOLoss(irreducible={os.fspath(path)!r})", "Write the file with torch.save(losses, path)."
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{who}: this file cannot be read: {error}. {mend}") from error
    kind = PerSample(torch.float32)
    try:
        return kind(saved)
    except ValueError as error:
        raise ValueError(f"{who}: this file must hold {kind.expected}. {error} {mend}") from None
