"""RHO-LOSS: train on the samples whose loss could still fall most (Mindermann et al. 2022, arXiv:2206.07137)."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scores, agree
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._choosing import (
    Choosing,
    check_keep,
    check_sample_loss,
    largest,
    others,
    random_subset,
)
from lightning_eff.data.selection._irreducible import irreducible_losses


def reducible(losses: Tensor, irreducible: Tensor) -> Tensor:
    """The reducible holdout loss ``l_i - l_i^IL``, both of shape (B,), in float64: what of a loss can still be learnt."""
    return losses.double() - irreducible.double()


def _random_subset(technique: "RHOLoss") -> Mapping[str, Callback]:
    return random_subset(technique.keep)


def _pointless(profile: RunProfile) -> str | None:
    if profile.epochs < 2:
        return "the run goes over its data less than twice, which the passes that find irreducible losses already do"
    return needs_samples(profile)


class RHOLoss(Choosing):
    """Train on the ``round(keep * B)`` samples of each batch of ``B`` whose reducible loss is largest, at least 1.

    The reducible loss is the sample's loss now, by a forward-only pass, less its irreducible loss: what is left of it by a
    model that learnt from other samples. Samples that are learnt already have none, nor have those that cannot be learnt,
    such as wrong labels, which choosing by the loss alone prefers. The mean loss of the samples chosen is not reweighted.

    Irreducible losses are known by a sample's data set index, each found once: given by ``irreducible``, or found before the
    first step. For that a model is trained on one random half of the training data and finds the losses of the other, and the
    other way round, as in the paper's variant without holdout data. The model is the module itself, from the weights that the
    run begins with, which it has again afterwards; or ``model``, a smaller one. What this costs, ``epochs`` passes over the
    data and a forward pass, is counted as the run's own, in its time and in its report. ``irreducible_losses`` has them after a
    fit, for ``torch.save``. Checkpoints hold them, so that a resumed run finds none again.

    Random augmentation and masking make other samples of one index: its irreducible loss is then one draw's.

    The loss is seen through the loss functions of ``torch.nn.functional`` (and so ``torch.nn``'s modules):
    ``training_step`` must return the sum of their mean-reduced values, whose rows lie sample by sample; the first batch
    is checked for it. Any other loss needs ``sample_loss``. Under accumulation each micro-batch is chosen from by itself,
    under DDP each rank's.

    Logged: ``active``, whether the last step chose, ``fraction``, the share of its batch that it trained on, and
    ``irreducible_loss``, the mean over the data set.

    Args:
        keep: ``n_b / n_B``, the share of each batch that is trained on, in (0, 1]; 0.1 is the paper's. 1 is plain training.
        irreducible: one number for each sample of the data set, in the order of their indices, shape (N,); or the path of a
            tensor that ``torch.save`` wrote. None finds them.
        model: a LightningModule whose ``training_step`` takes the same batches, which finds them in the module's place.
        epochs: passes over each half of the data, >= 1, by which that model is trained.
        lr: the rate at which AdamW trains it, > 0; it falls to 0 linearly.
        sample_loss: for a loss that cannot be seen by sample: a function of (module, batch) that returns the losses of
            the batch's samples, shape (B,). It is used to choose and to find irreducible losses by.

    Raises:
        ValueError: for other values; as training starts, where the loader does not tell a batch's indices, as for an
            IterableDataset, or there are not as many numbers as samples; at the first step, on all ranks, if the loss cannot be
            seen by sample, a batch holds one sample only or not one for each index; at any step, if a loss is nan or infinite.

    Sources:
        Mindermann et al. 2022, arXiv:2206.07137. Kaddour et al. 2023, arXiv:2307.06440, find no gain at equal time.
    """

    saves: ClassVar[str] = "backward passes: those samples are trained on whose loss can still fall"
    paper: ClassVar[str] = "Mindermann et al. 2022, arXiv:2206.07137"
    constraints: ClassVar[str] = (
        "a DataLoader over a map-style data set; a mean loss of torch.nn.functional, or sample_loss=; several epochs"
    )
    needs: ClassVar[Need] = Need.WHOLE
    survey: ClassVar[Survey | None] = Survey("RHO-LOSS", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"keep": Choice((0.1, 0.25, 0.5)), "epochs": Choice((1, 3))}, _pointless
    )
    control: ClassVar[Control] = Control("a random choice of as many samples, without scoring", _random_subset)
    conflicts: ClassVar[Mapping[str, str]] = others("RHOLoss")

    def __init__(
        self,
        keep: float = 0.1,
        *,
        irreducible: str | os.PathLike[str] | Sequence[float] | Tensor | None = None,
        model: LightningModule | None = None,
        epochs: int = 1,
        lr: float = 1e-3,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        check_keep("RHOLoss", keep)
        check_sample_loss("RHOLoss", sample_loss)
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise ValueError(f"RHOLoss({epochs=}): expected an integer >= 1, passes over each half of the data.")
        if not 0 < lr < float("inf"):
            raise ValueError(
                f"RHOLoss({lr=}): expected a finite number > 0, the rate of the irreducible model's AdamW."
            )
        if model is not None and (irreducible is not None or not is_a(model, LightningModule)):
            raise ValueError(
                f"RHOLoss(model={type(model).__name__}(...)): expected a LightningModule whose training_step takes the same"
                " batches, and no irreducible= beside it, which would leave it nothing to find."
            )
        self.keep, self.model, self.epochs, self.lr, self.sample_loss = keep, model, epochs, lr, sample_loss
        self.given = None if irreducible is None else _given(irreducible)
        self._reset()

    @override
    def _reset(self) -> None:
        super()._reset()
        self.irreducible_losses: Tensor | None = self.given

    @property
    @override
    def neutral(self) -> bool:
        return self.keep == 1

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        session.loaders.told_to = session.loaders.told_to or "RHOLoss"

    @override
    def on_model(self, session: Session) -> None:
        if self.given is None and is_checkpointed_reentrantly((self.model or session.module).modules()):
            raise ValueError(
                "RHOLoss: the module's blocks are checkpointed with use_reentrant=True; expected use_reentrant=False, because"
                " the irreducible model's gradients are taken by torch.autograd.grad. Set that, or give irreducible=."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.neutral:
            return
        samples, held = self.session.loaders.num_samples, self.irreducible_losses
        if samples is None:
            raise ValueError(
                "RHOLoss: the training loader does not tell which samples a batch has; expected one DataLoader over a map-style"
                " data set, both with a length, because irreducible losses are known by index. Give the data set's samples by"
                " index, or use OrderedSGD, which needs none."
            )
        if held is not None and len(held) != samples:
            raise ValueError(
                f"RHOLoss: got {len(held):,} irreducible losses for a data set of {samples:,} samples; expected one for each,"
                " in the order of their indices. Give as many, or train on the data set that they are of."
            )
        if samples < 2 * self.session.replicas.count and held is None:
            raise ValueError(
                f"RHOLoss: got a data set of {samples} sample(s); expected at least two for each process, since each half is"
                " learnt and scored. Give irreducible=."
            )

    @override
    def share(self, step: Step) -> float:
        return self.keep

    @override
    def score(self, step: Step, batch: Any, size: int) -> Scores:
        problem = self._unknown(step, size)
        if self.irreducible_losses is None:  # which is so on all ranks, or on none
            (size_of_all, *_) = agree(self.session, problem, size)
            self.irreducible_losses = irreducible_losses(
                self.session, self._scorer, self.model, size=size_of_all, epochs=self.epochs, lr=self.lr
            ).float()
            cost = self.session.chain.cost
            rank_zero_info(
                f"RHOLoss: irreducible losses of {len(self.irreducible_losses):,} samples found, on average"
                f" {float(self.irreducible_losses.mean()):.4g}, in {cost.seconds:.1f} s of extra passes"
            )
        return Scores(problem=problem) if problem is not None else super().score(step, batch, size)

    def _unknown(self, step: Step, size: int) -> ValueError | None:
        """What is wrong where the loader gave others, or another number of indices."""
        indices = step.indices
        if indices is not None and len(indices) == size and all(isinstance(i, int) for i in indices):
            return None
        if indices is None:
            return ValueError(
                f"RHOLoss: it is not known which samples a batch holds, because {self.session.loaders.why_unknown}. Pass a"
                " torch.utils.data.DataLoader over a dataset with __getitem__ and __len__, or use OrderedSGD, which needs none."
            )
        return ValueError(
            f"RHOLoss: the loader gave {len(indices)} indices for a batch of {size} samples;"
            " expected one integer for each, by which its irreducible loss is known. Give the loader a batch_size and a"
            " collate_fn that makes one sample of each index."
        )

    @override
    def train(self, step: Step, batch: Any, proceed: Proceed, scores: Scores, size: int, k: int) -> Any:
        assert self.irreducible_losses is not None and step.indices is not None
        rho = reducible(scores.means, self.irreducible_losses[torch.tensor(step.indices)])
        return proceed(step.pick(batch, largest(rho, k=k), size))

    # -- what it tells and keeps

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        held = self.irreducible_losses
        return {**super().report(), **({} if held is None else {"irreducible_loss": held.mean()})}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "irreducible_losses": self.irreducible_losses}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.irreducible_losses = state_dict["irreducible_losses"]


def _given(irreducible: Any) -> Tensor:
    """The irreducible losses in float32, on the CPU.

    Raises:
        ValueError: if they are no finite numbers in a row, or the file has none.
    """
    what = "..."
    if isinstance(irreducible, str | os.PathLike):
        what = repr(os.fspath(irreducible))
        try:
            irreducible = torch.load(irreducible, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"RHOLoss(irreducible={what}): expected a file with a tensor of shape (N,), as torch.save(losses, path) writes"
                f" it; {error}."
            ) from error
    try:
        found = torch.as_tensor(irreducible).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"RHOLoss(irreducible={what}): expected one number for each sample of the data set; {error}."
        ) from error
    if found.ndim != 1 or not len(found) or found.is_complex() or not bool(found.isfinite().all()):
        raise ValueError(
            f"RHOLoss(irreducible={what}): got {found.dtype} values of shape {tuple(found.shape)}, all finite:"
            f" {bool(found.isfinite().all())}; expected one finite number for each sample of the data set, shape (N,)."
        )
    return found.float()
