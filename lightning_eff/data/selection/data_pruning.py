"""Data pruning: score each sample once, and train on the best of them alone (Paul et al. 2021; Sorscher et al. 2022)."""

import importlib.util
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.technique import Choice as Chosen
from lightning_eff._core._samples.technique import Epoch, SampleChooser
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._offline.files import Told, check_suffix, fingerprint, read, save
from lightning_eff.data.selection._offline.scores import best, prototype_distances, without_samples
from lightning_eff.data.selection._offline.scoring import DataScorer, look, score_all
from lightning_eff.data.selection._subset import check_told, of_subset

WHO = "DataPruning"
NAMED = ("el2n", "grand", "prototypes", "random")
CLASS_SIZE = 20  # samples of a class that would hardly all be left out by chance


def _at_random(technique: "DataPruning") -> Mapping[str, Callback]:
    """As many samples at random, from the same epoch on, and as balanced."""
    if technique.neutral or technique.score == "random":
        return {}
    kept = {name: getattr(technique, name) for name in ("keep", "epochs", "balance")}
    return {f"a random {technique.keep:.0%} of the data set": DataPruning("random", **kept)}


def _pointless(profile: RunProfile) -> str | None:
    if not profile.visible_loss:
        return "the loss cannot be taken apart by sample"
    return None if profile.epochs > 2 else "the run sees its data too seldom to score it first"


class DataPruning(SampleChooser):
    """Train on all samples for a few epochs, score each, and from then on train on the share ``keep`` of them alone.

    A score says how hard a sample is, by the module as it is when ``epochs`` epochs are done:

    - ``"el2n"``: ``||p - y||_2``, the error of the predicted probabilities, in [0, sqrt 2] for a softmax; of a sample with
      several rows (tokens) the root of the mean of their squares, over those that count. One forward pass.
    - ``"grand"``: the norm of the gradient of the sample's own loss, of the last linear map's parameters, or of all that
      train (``gradients``), which takes a forward and a backward pass for each sample alone.
    - ``"prototypes"``: the distance of its embedding to the centroid of its cluster by k-means. An embedding is what comes into
      the last linear map, averaged over positions. For modules that bring good embeddings with them; needs scikit-learn.
    - ``"random"``: no score, the control.
    - the path of a file with scores, as ``save_as`` writes it, or by hand: ``{"num_samples": 3, "fingerprint": null,
      "scores": [0.1, 0.5, 0.2]}`` in a ``.json``, or arrays by these names in an ``.npz``.

    Passes run in evaluation mode through the unchanged ``training_step``, in the user's loader's order of indices, and are
    counted with the run's extra passes. What the data set draws at random is drawn for them apart from the run. The kept ones
    are the hardest, as the papers have it where data is plentiful; ``easy=True`` keeps the easiest, for few data (Sorscher et
    al.) or wrong labels, which are hard samples too. Epochs then have fewer batches, in the user's own order: a run of so many
    epochs takes less time, one of so many steps or seconds sees each sample more often. Schedules that ask the Trainer before
    for how many steps there will be count whole epochs, so say how long the run is by ``max_steps``; and where a last batch of
    one sample is too small (BatchNorm), give the loader ``drop_last``.

    GraNd and EL2N before any training (``epochs=0``) say little: the published results at initialization did not replicate.
    Early in training they tell classes apart more than samples: of the digits in ``benchmarks/vit`` the hardest half after one
    epoch of 60, the default, had samples of six classes of ten, and the others were forgotten; after four it had all ten. The
    papers score after about a tenth of the run. ``balance`` holds classes together at any time; where the loss is given one
    class for each sample and one of which there were 20 samples has none left, a warning says so.

    Logged: ``samples`` of the data set that the epoch is drawn from, ``share``, and ``passes`` over the data set so far.

    Args:
        score: one of the names above, or the path of a file of scores.
        keep: the share of the data set that is kept, in (0, 1]: ``round(keep N)`` samples, one at least. 1 is plain training.
        epochs: on all samples before pruning, >= 0. None is 1, and 0 with scores from a file.
        passes: scores are averaged over the ends of the last so many of these epochs, in [1, max(1, epochs)].
        easy: keep the samples of the lowest scores in place of the highest.
        balance: how much classes are balanced, in [0, 1]: of C classes each keeps its own best ``balance / C`` of the kept
            ones, or all that it has. Needs a loss with one integer class for each sample.
        gradients: of ``"grand"``: "head" or "all".
        clusters: of ``"prototypes"``, >= 1.
        head: the path of the last ``nn.Linear`` for ``"prototypes"`` and ``"grand"``; None takes the last one called whose
            output has as many classes as the loss's input.
        save_as: a path that ends in ``.json`` or ``.npz``, for the scores with the data set's length and fingerprint; None
            keeps them in the run's checkpoints alone.

    Raises:
        ImportError: as a fit begins, if ``"prototypes"`` are asked for and scikit-learn is not installed.
        ValueError: if an argument is out of its range, or a file cannot be used; as a fit begins, if the run ends before it
            prunes or the module optimizes manually; before the first step, on all ranks, if samples cannot be scored as asked,
            or a file of scores is of another data set, by its length or fingerprint.

    Sources:
        Paul et al. 2021, arXiv:2107.07075 (GraNd, EL2N); Sorscher et al. 2022, arXiv:2206.14486 (prototypes, balance, easy or
        hard); Kirsch 2023, arXiv:2303.14753 (GraNd at initialization does not replicate).
    """

    saves: ClassVar[str] = "steps on samples that a score leaves out; its passes are paid first"
    paper: ClassVar[str] = "Paul et al. 2021, arXiv:2107.07075; Sorscher et al. 2022, arXiv:2206.14486"
    constraints: ClassVar[str] = "one DataLoader over a map-style data set; 'el2n' needs a loss seen by sample"
    needs: ClassVar[Need] = Need.STEP
    survey: ClassVar[Survey | None] = Survey("data pruning (GraNd, EL2N, prototypes)", zhuang="2.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"score": Choice(("el2n",)), "keep": Uniform(0.4, 0.9), "easy": Choice((False, True))}, _pointless
    )
    control: ClassVar[Control] = Control("as many samples at random, from the same epoch on", _at_random)
    conflicts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("DifficultyPacing", "SampleSubset", "TokenBudgetBatches"), "both say which samples an epoch has"
    )
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        score: str = "el2n",
        keep: float = 0.5,
        *,
        epochs: int | None = None,
        passes: int = 1,
        easy: bool = False,
        balance: float = 0.0,
        gradients: str = "head",
        clusters: int = 10,
        head: str | None = None,
        save_as: str | None = None,
    ) -> None:
        if not 0 < keep <= 1:
            raise ValueError(
                f"{WHO}({keep=}): expected a number in (0, 1], the share of the samples that is kept. 1 is plain training."
            )
        self.told: Told | None = None
        if score not in NAMED:
            if not Path(score).suffix:
                raise ValueError(
                    f"{WHO}({score=}): expected one of {', '.join(NAMED)}, or the path of a file of scores, .json or .npz."
                )
            self.told = read(score, "scores", who=WHO)
        epochs = (0 if self.told else 1) if epochs is None else epochs
        for name, value, least in (("epochs", epochs, 0), ("passes", passes, 1), ("clusters", clusters, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= {least}.")
        if passes > max(1, epochs):
            raise ValueError(
                f"{WHO}({passes=}, {epochs=}): expected passes <= {max(1, epochs)}, because one is made as each of the epochs"
                " ends. Raise epochs, or lower passes."
            )
        if not 0 <= balance <= 1:
            raise ValueError(
                f"{WHO}({balance=}): expected a share in [0, 1] of what is kept, divided over the classes."
            )
        if gradients not in ("head", "all"):
            raise ValueError(f"{WHO}({gradients=}): expected 'head', the last linear map's, or 'all'.")
        if save_as is not None:
            check_suffix(save_as, who=f"{WHO}(save_as=...): ")
        self.score, self.keep, self.epochs, self.passes = score, keep, epochs, passes
        self.easy, self.balance, self.gradients = easy, balance, gradients
        self.clusters, self.head, self.save_as = clusters, head, save_as
        self._reset()

    def _reset(self) -> None:
        self._sum: Tensor | None = None  # of the scores of all passes
        self._labels: Tensor | None = None
        self._kept: Tensor | None = None
        self._passes = self._rounds = self._size = self._samples = 0
        self._looked = False  # whether it is known that samples can be scored

    @property
    @override
    def neutral(self) -> bool:
        return self.keep == 1.0

    @property
    def _passes_over_data(self) -> bool:
        return self.score in NAMED[:3] or self.balance > 0

    @override
    def check(self, session: Session) -> None:
        if self._passes_over_data and not session.module.automatic_optimization:
            raise ValueError(
                f"{WHO}(score={self.score!r}): {type(session.module).__name__} has automatic_optimization=False; expected"
                " True, because its training_step then moves weights and cannot be asked for losses alone. Give a file of"
                " scores, and no balance."
            )
        most = session.trainer.max_epochs
        trial = bool(session.trainer.fast_dev_run)  # pyright: ignore[reportAttributeAccessIssue]
        if not trial and most is not None and 0 <= most <= self.epochs:
            raise ValueError(
                f"{WHO}(epochs={self.epochs}): the Trainer has max_epochs={most}, so the run ends before a sample is left out;"
                f" expected more than {self.epochs} epochs. Raise max_epochs, or lower epochs."
            )
        if self.score == "prototypes" and importlib.util.find_spec("sklearn") is None:
            raise ImportError(
                f"{WHO}(score='prototypes') needs scikit-learn for its k-means. Run: pip install 'lightning-eff[select]'"
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()

    # -- what an epoch has

    @override
    def choose(self, epoch: Epoch) -> Chosen | None:
        if epoch.left is not None:  # another technique of the tests' asks for it; nothing changes within an epoch
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
                f"{WHO}: the data set has {epoch.size:,} samples in epoch {epoch.number}, and had {self._size:,} before;"
                " expected one data set throughout, whose samples are scored once. Take reload_dataloaders_every_n_epochs out."
            )
        if self.told is not None and not self._size:
            check_told(self.session, self.told, who=WHO)
        if self.score == "prototypes" and self.clusters > epoch.size:
            raise ValueError(
                f"{WHO}(clusters={self.clusters}): the data set has {epoch.size:,} samples; expected at most as many clusters."
            )

    def _look_ahead(self, epoch: Epoch) -> None:
        """What cannot be scored is told before training begins; so is that it will not come to it."""
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
                f" epoch(s) on all samples have about {steps:,}: no sample will be left out. Raise max_steps, or give a file of"
                " scores."
            )

    def _scorer(self) -> DataScorer:
        kind = self.score if self.score in NAMED[:3] else "labels"
        return DataScorer(WHO, kind, gradients=self.gradients, head=self.head, labels=self.balance > 0)

    def _score(self, epoch: Epoch) -> None:
        """One pass over the data set, whose scores are added to those of others."""
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
        self._tell_of_lost_classes()
        if self.save_as is not None and session.rank == 0:
            loader = session.loaders.latest
            assert loader is not None
            with rng.keyed(0, WHO, "fingerprint"):
                told = fingerprint(loader.dataset)
            save(self.save_as, num_samples=size, fingerprint=told, scores=scores.numpy())

    def _tell_of_lost_classes(self) -> None:
        if self._labels is None or self._kept is None:
            return
        lost = without_samples(self._labels, self._kept, CLASS_SIZE)
        if lost:
            classes = int((self._labels.unique() >= 0).sum())
            some = ", ".join(map(str, lost[:10])) + (", ..." if len(lost) > 10 else "")
            rank_zero_warn(
                f"{WHO}(score={self.score!r}, keep={self.keep:g}): none of the {len(self._kept):,} samples that are kept is of"
                f" {'one' if len(lost) == 1 else len(lost)} of {classes} classes ({some}), which the module"
                f" will forget. Scores after {self.epochs} epoch(s) may tell classes apart more than samples: raise epochs, or"
                " take balance=1.0, by which each class keeps its own."
            )

    # -- what is told and kept

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"samples": self._samples, "share": self._samples / max(self._size, 1), "passes": self._passes}

    @override
    def summary(self) -> str:
        if self._kept is None:
            return f"no sample was left out: the run ended within the first {self.epochs} epoch(s)"
        which = (
            "at random" if self.score == "random" else f"the {'easiest' if self.easy else 'hardest'} by {self.score}"
        )
        return (
            f"kept {len(self._kept):,} of {self._size:,} samples, {which}, after {self._passes} pass(es) over the data"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "sum": self._sum,
            "labels": self._labels,
            "kept": self._kept,
            "passes": self._passes,
            "rounds": self._rounds,
            "looked": self._looked,
            "size": self._size,
            "samples": self._samples,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sum, self._labels, self._kept = state_dict["sum"], state_dict["labels"], state_dict["kept"]
        self._passes, self._rounds = state_dict["passes"], state_dict["rounds"]
        self._size, self._samples = state_dict["size"], state_dict["samples"]
        self._looked = state_dict["looked"]
