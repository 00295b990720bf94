"""Data pruning: score each sample once, and train only on the best (Paul et al. 2021; Sorscher et al. 2022)."""

import importlib.util
import math
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.kinds import Count, Either, Fraction, OneOf, Text
from lightning_eff._core._arguments.objects import FilePath
from lightning_eff._core._lightning.extras import missing
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.technique import Choice as Chosen
from lightning_eff._core._samples.technique import Epoch, SampleChooser
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._offline.files import SUFFIXES, fingerprint, read, save
from lightning_eff.data.selection._offline.scores import best, prototype_distances, without_samples
from lightning_eff.data.selection._offline.scoring import DataScorer, look, score_all
from lightning_eff.data.selection._subset import check_told, of_subset

WHO = "DataPruning"
NAMED = ("el2n", "grand", "prototypes", "random")
CLASS_SIZE = 20  # a class of this size is hardly removed by chance


def _at_random(technique: "DataPruning") -> Mapping[str, Callback]:
    """Keep as many samples at random, from the same epoch on and as balanced."""
    if technique.neutral or technique.score == "random":
        return {}
    kept = {name: getattr(technique, name) for name in ("keep", "epochs", "balance")}
    return {f"a random {technique.keep:.0%} of the data set": DataPruning("random", **kept)}


def _pointless(profile: RunProfile) -> str | None:
    if not profile.visible_loss:
        return "the loss of each sample cannot be seen"
    return None if profile.epochs > 2 else "the run sees its data too few times to score it first"


class DataPruning(SampleChooser):
    """Score all samples after a few epochs, and train only on a fraction of them from then on.

    A score says how hard a sample is for the module after ``epochs`` epochs:

    - ``"el2n"``: ``||p - y||_2``, the error of the predicted probabilities, in [0, sqrt 2] for a softmax. For a sample with
      several rows (tokens), it is the root mean square over the rows that count. It costs one forward pass.
    - ``"grand"``: the norm of the gradient of the sample's own loss, with respect to the last linear layer or to all trainable
      parameters (``gradients``). It costs a forward and a backward pass per sample.
    - ``"prototypes"``: the distance between a sample's embedding and the centroid of its k-means cluster. The embedding is the
      input of the last linear layer, averaged over positions. Use it for modules with good (pretrained) embeddings. It needs
      scikit-learn.
    - ``"random"``: no score, as a control.
    - the path of a file of scores, as ``save_as`` writes it. You can also write one: ``{"num_samples": 3, "fingerprint": null,
      "scores": [0.1, 0.5, 0.2]}`` as ``.json``, or arrays with these names as ``.npz``.

    Scoring runs the unchanged ``training_step`` in evaluation mode. Its cost counts as extra passes of the run, and its random
    draws do not affect the run. The hardest samples are kept, as the papers recommend for plentiful data. ``easy=True`` keeps
    the easiest, for few data (Sorscher et al.) or wrong labels, which are hard samples too.

    Use it for runs of many epochs over redundant data. Epochs then have fewer batches in the user's own order: a run of a fixed
    number of epochs takes less time, and a run of a fixed number of steps or seconds sees each sample more often. Schedules
    that ask the Trainer for the number of steps count whole epochs, so set ``max_steps``. If a last batch of one sample is too
    small (for example for BatchNorm), use ``drop_last`` in the loader.

    Early scores separate classes more than samples. In ``benchmarks/vit``, the hardest half of the digits after one of 60
    epochs had samples of only six of ten classes, and the module forgot the others. After four epochs it had all ten. The
    papers score after about a tenth of the run. ``balance`` keeps all classes at any time. A warning reports classes of at
    least 20 samples that lose all of them. GraNd and EL2N before training (``epochs=0``) say little: the published results at
    initialization did not replicate.

    It logs ``samples`` (the size of the data set that the epoch uses), ``share`` (its fraction) and ``passes`` (the number of
    scoring passes so far).

    Args:
        score: the name of a score, or the path of a file of scores.
        keep: the fraction of the data set to keep, ``round(keep * N)`` samples, at least one. 1 is plain training.
        epochs: the number of epochs on all samples before pruning. None is 1, or 0 with scores from a file.
        passes: the number of last epochs at whose ends samples are scored. Their scores are averaged.
        easy: whether to keep the samples with the lowest scores instead of the highest.
        balance: the fraction of the kept samples that is divided evenly over the classes. Each of ``C`` classes keeps its own
            best ``balance / C`` of the kept samples, or all that it has. Needs a loss with one integer class per sample.
        gradients: the parameters whose gradient ``"grand"`` takes. "head" is the last linear layer.
        clusters: the number of clusters of ``"prototypes"``.
        head: the path of the last ``nn.Linear`` for ``"prototypes"`` and ``"grand"``. None takes the last one called whose
            output has as many classes as the loss's input.
        save_as: a path that ends in ``.json`` or ``.npz``, to save the scores with the data set's length and fingerprint. None
            keeps them only in checkpoints.

    Raises:
        ImportError: when a fit begins, if ``"prototypes"`` is used and scikit-learn is not installed.
        ValueError: for a value out of range, or a file that cannot be used. When a fit begins, if the run ends before it prunes
            or the module uses manual optimization. Before the first step, on all ranks, if samples cannot be scored as asked,
            or a file belongs to another data set (by its length or fingerprint).

    Example:
        >>> trainer = L.Trainer(max_epochs=20, callbacks=[DataPruning("el2n", keep=0.5, epochs=2)])

    References:
        Paul et al. 2021, "Deep Learning on a Data Diet", arXiv:2107.07075 (GraNd, EL2N). Sorscher et al. 2022, "Beyond neural
        scaling laws: beating power law scaling via data pruning", arXiv:2206.14486 (prototypes, balance, easy or hard). Kirsch
        2023, "Does 'Deep Learning on a Data Diet' reproduce?", arXiv:2303.14753.
    """

    saves = "steps on samples that a score removes, after the cost of scoring"
    paper = "Paul et al. 2021, arXiv:2107.07075; Sorscher et al. 2022, arXiv:2206.14486"
    constraints = "needs one DataLoader over a map-style data set; 'el2n' also needs a visible loss per sample"
    needs: ClassVar[Need] = Need.STEP
    search_space = SearchSpace(
        {"score": Choice(("el2n",)), "keep": Uniform(0.4, 0.9), "easy": Choice((False, True))}, _pointless
    )
    control = Control("as many samples at random, from the same epoch on", _at_random)
    conflicts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("DifficultyPacing", "SampleSubset", "TokenBudgetBatches"), "both choose the samples of an epoch"
    )
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"keep": 1.0}
    checkpointed = (
        "_sum",
        "_labels",
        "_kept",
        "_passes",
        "_rounds",
        "_looked",
        "_size",
        "_samples",
    )

    def __init__(
        self,
        score: Annotated[str, Either(OneOf(*NAMED), FilePath("the path of a file of scores", SUFFIXES))] = "el2n",
        keep: Annotated[float, Fraction(above=0)] = 0.5,
        *,
        epochs: Annotated[int | None, Count(at_least=0)] = None,
        passes: Annotated[int, Count()] = 1,
        easy: bool = False,
        balance: Annotated[float, Fraction()] = 0.0,
        gradients: Literal["head", "all"] = "head",
        clusters: Annotated[int, Count()] = 10,
        head: Annotated[str, Text("a dotted path of a module")] | None = None,
        save_as: Annotated[str, FilePath("a path", SUFFIXES)] | None = None,
    ) -> None:
        self.told = None if score in NAMED else read(score, "scores", who=WHO)
        epochs = (0 if self.told else 1) if epochs is None else epochs
        if passes > max(1, epochs):
            raise ValueError(
                f"{WHO}({passes=}, {epochs=}): samples are scored at most once per epoch before pruning. Use"
                f" passes={max(1, epochs)} or epochs={passes}."
            )
        self.score, self.keep, self.epochs, self.passes = score, keep, epochs, passes
        self.easy, self.balance, self.gradients = easy, balance, gradients
        self.clusters, self.head, self.save_as = clusters, head, save_as

    def _reset(self) -> None:
        self._sum: Tensor | None = None  # sum of the scores of all passes
        self._labels: Tensor | None = None
        self._kept: Tensor | None = None
        self._passes = self._rounds = self._size = self._samples = 0
        self._looked = False  # whether it is known that samples can be scored

    @property
    def _passes_over_data(self) -> bool:
        return self.score in NAMED[:3] or self.balance > 0

    @override
    def check(self, session: Session) -> None:
        if self._passes_over_data and not session.module.automatic_optimization:
            raise ValueError(
                f"{WHO}(score={self.score!r}): {type(session.module).__name__} has automatic_optimization=False, so its"
                " training_step changes weights and cannot be run for scores. Give a file of scores, and balance=0."
            )
        most = session.trainer.max_epochs
        trial = bool(session.trainer.fast_dev_run)  # pyright: ignore[reportAttributeAccessIssue]
        if not trial and most is not None and 0 <= most <= self.epochs:
            raise ValueError(
                f"{WHO}(epochs={self.epochs}): the Trainer has max_epochs={most}, so the run ends before a sample is pruned."
                f" Raise max_epochs above {self.epochs}, or lower epochs."
            )
        if self.score == "prototypes" and importlib.util.find_spec("sklearn") is None:
            raise ImportError(missing(f"{WHO}(score='prototypes')", "scikit-learn", "select"))

    # -- an epoch's samples

    @override
    def choose(self, epoch: Epoch) -> Chosen | None:
        if epoch.left is not None:  # nothing changes within an epoch
            return None
        self._check_size(epoch)
        if self._kept is None:
            if epoch.number < self.epochs and not self._size:
                self._look_ahead(epoch)
            self._size = epoch.size
            if epoch.number >= self.epochs - self.passes + 1 or not self.epochs:
                self._score(epoch)
            if epoch.number >= self.epochs:
                self._prune(epoch.size)
        self._samples = epoch.size if self._kept is None else len(self._kept)
        return None if self._kept is None else of_subset(epoch, self._kept, who=WHO)

    def _check_size(self, epoch: Epoch) -> None:
        if self._size and epoch.size != self._size:
            raise ValueError(
                f"{WHO}: the data set has {epoch.size:,} samples in epoch {epoch.number}, and had {self._size:,} before, but"
                " samples are scored only once. Remove reload_dataloaders_every_n_epochs from the Trainer."
            )
        if self.told is not None and not self._size:
            check_told(self.session, self.told, who=WHO)
        if self.score == "prototypes" and self.clusters > epoch.size:
            raise ValueError(
                f"{WHO}(clusters={self.clusters}): the data set has {epoch.size:,} samples. Use at most as many clusters."
            )

    def _look_ahead(self, epoch: Epoch) -> None:
        """Before training, raise if samples cannot be scored, and warn if the run ends before it prunes."""
        if self._passes_over_data:
            with rng.keyed(self.session.seed, WHO, "look"):
                look(self.session, self._scorer(), epoch.size)
            self._looked = True
        trainer, loader = self.session.trainer, self.session.loaders.latest
        assert loader is not None and loader.chosen is not None
        batches = len(epoch.order) / ((loader.chosen.batch_size or 1) * self.session.replicas.count)
        steps = self.epochs * math.floor(batches / trainer.accumulate_grad_batches)
        if 0 <= trainer.max_steps < steps and not trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            rank_zero_warn(
                f"{WHO}(epochs={self.epochs}): the run ends after {trainer.max_steps:,} steps, and the first {self.epochs}"
                f" epoch(s) on all samples have about {steps:,}, so no sample will be pruned. Raise max_steps, or give a file"
                " of scores."
            )

    def _scorer(self) -> DataScorer:
        kind = self.score if self.score in NAMED[:3] else "labels"
        return DataScorer(WHO, kind, gradients=self.gradients, head=self.head, labels=self.balance > 0)

    def _score(self, epoch: Epoch) -> None:
        """Score the data set in one pass, and add the scores to those of other passes."""
        session = self.session
        found = None
        if self._passes_over_data:
            scorer = self._scorer()
            found, embeddings, self._labels = score_all(session, scorer, epoch.size)
            self._passes += 1
            if embeddings is not None:
                start = time.perf_counter()
                seed = session.generator(WHO, "k-means", epoch.number).initial_seed()
                own = prototype_distances(embeddings, self.clusters, seed) if session.rank == 0 else None
                found = session.gather(own)[0]
                session.chain.cost.seconds += time.perf_counter() - start
        if self.told is not None:
            found = torch.from_numpy(self.told.values)
        elif self.score == "random":
            found = torch.rand(epoch.size, generator=session.generator(WHO, "random"), dtype=torch.float64)
        assert found is not None
        self._sum = found.clone() if self._sum is None else self._sum + found
        self._rounds += 1

    def _prune(self, size: int) -> None:
        session = self.session
        assert self._sum is not None
        scores = self._sum / self._rounds
        count = max(1, round(self.keep * size))
        self._kept = best(scores, count, easy=self.easy, labels=self._labels, balance=self.balance)
        self._warn_of_lost_classes()
        if self.save_as is not None and session.rank == 0:
            loader = session.loaders.latest
            assert loader is not None
            with rng.keyed(0, WHO, "fingerprint"):
                told = fingerprint(loader.dataset)
            save(self.save_as, num_samples=size, fingerprint=told, scores=scores.numpy())

    def _warn_of_lost_classes(self) -> None:
        if self._labels is None or self._kept is None:
            return
        lost = without_samples(self._labels, self._kept, CLASS_SIZE)
        if lost:
            classes = int((self._labels.unique() >= 0).sum())
            some = ", ".join(map(str, lost[:10])) + (", ..." if len(lost) > 10 else "")
            names = f"class {some}" if len(lost) == 1 else f"{len(lost)} of {classes} classes ({some})"
            rank_zero_warn(
                f"{WHO}(score={self.score!r}, keep={self.keep:g}): none of the {len(self._kept):,} kept samples is of {names},"
                f" which the module will forget. Score later than after {self.epochs} epoch(s) with epochs=, or use"
                " balance=1.0 to keep samples of each class."
            )

    # -- report and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"samples": self._samples, "share": self._samples / max(self._size, 1), "passes": self._passes}

    @override
    def summary(self) -> str:
        if self._kept is None:
            return f"pruned no sample, because the run ended within the first {self.epochs} epoch(s)"
        which = (
            "at random" if self.score == "random" else f"the {'easiest' if self.easy else 'hardest'} by {self.score}"
        )
        return (
            f"kept {len(self._kept):,} of {self._size:,} samples, {which}, after {self._passes} pass(es) over the data"
        )
