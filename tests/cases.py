"""One case for each exported technique and each stand-in: how the contract's tests set it up, and what it must refuse."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

import lightning.pytorch as pl

import lightning_eff as eff
from lightning_eff._core.technique import Technique
from lightning_eff.data.curriculum.sequence_length_warmup import ShortSequences
from lightning_eff.data.selection._random_subset import RandomSubset
from lightning_eff.model.growth._shallower import Shallower


@dataclass(frozen=True)
class Case:
    """How one technique is tried.

    Attributes:
        active: builds it so that it acts within a run of 12 steps of 4 samples.
        neutral: builds it with settings that make it plain training.
        model: the module of ``tests.models`` it is tried on, unless a test says otherwise.
        exact: whether it saves memory or time and leaves weights bit for bit those of plain training.
        figure: of an exact technique, whose effect weights do not show: the quantity of its report that is above zero once
            it has acted.
        lossy: whether what it computes depends on which tensors autograd saves.
        saves_less: whether autograd saves other tensors with it.
        own_optimizer: whether its checkpoints hold the state of another optimizer than the module's, which a plain run
            refuses to go on from.
        refuses_manual: whether these settings refuse manual optimization; None where the class says it.
        on_classifier: builds it for ``classifier``, where ``active`` does not suit that module.
        lost: a module on which it can find nothing to act on, with what the error must say; None where any will do.
        as_is: builds it for ``lost``, where ``active`` is made for modules as small as that.
    """

    active: Callable[[], Technique]
    neutral: Callable[[], Technique]
    model: str = "tiny_gpt"
    exact: bool = False
    figure: str = ""
    lossy: bool = False
    saves_less: bool = False
    own_optimizer: bool = False
    refuses_manual: bool | None = None
    on_classifier: Callable[[], Technique] | None = None
    lost: tuple[Callable[[], pl.LightningModule], str, str] | None = None
    as_is: Callable[[], Technique] | None = None


def _no_blocks() -> pl.LightningModule:
    from torch import nn

    from tests.models import TinyClassifier

    module = TinyClassifier()
    module.blocks = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    module.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 3))
    return module


def _own_loss() -> pl.LightningModule:
    import torch

    from tests.models import TinyClassifier

    class OwnLoss(TinyClassifier):
        def training_step(self, batch, batch_idx):
            return torch.logsumexp(self(batch[0]), dim=1).mean()

    return OwnLoss()


def _lbfgs() -> pl.LightningModule:
    import torch

    from tests.models import TinyClassifier

    module = TinyClassifier()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore[method-assign]
    return module


def _classifier() -> pl.LightningModule:
    from tests.models import TinyClassifier

    return TinyClassifier()


def _rising(u: float) -> float:
    return 0.85 + 0.1 * u


def _half(num_blocks: int) -> float:
    return num_blocks / 2


def _all(num_blocks: int) -> float:
    return num_blocks


CASES: dict[str, Case] = {
    "ActivationCompression": Case(
        active=lambda: eff.ActivationCompression(bits=2),
        neutral=lambda: eff.ActivationCompression(bits=32),
        lossy=True,
        lost=(_classifier, "classifier", "none of the [0-9,]+ bytes that the first step saves could be compressed"),
    ),
    "ActivationOffload": Case(
        active=lambda: eff.ActivationOffload(min_bytes=64),
        neutral=lambda: eff.ActivationOffload(min_bytes=inf),
        exact=True,
        figure="bytes_to_host",
        lost=(_classifier, "classifier", "is as large"),
        as_is=lambda: eff.ActivationOffload(),
    ),
    "ExactResume": Case(
        active=lambda: eff.ExactResume(), neutral=lambda: eff.ExactResume(), exact=True, figure="batches"
    ),
    "ImportanceSampling": Case(
        active=lambda: eff.ImportanceSampling(presample=2.0, threshold=0.5),
        neutral=lambda: eff.ImportanceSampling(threshold=inf),
        lost=(_own_loss, "classifier", "sample_loss"),
    ),
    "LatestWeightAveraging": Case(
        active=lambda: eff.LatestWeightAveraging(window=3, interval=2),
        neutral=lambda: eff.LatestWeightAveraging(start=1.0),
    ),
    "LocalSGD": Case(
        active=lambda: eff.LocalSGD(interval=3, warmup_steps=2),
        neutral=lambda: eff.LocalSGD(warmup_steps=inf),
        exact=True,
        figure="local_steps",
    ),
    "OptimizerOffload": Case(
        active=lambda: eff.OptimizerOffload(),
        neutral=lambda: eff.OptimizerOffload(),
        exact=True,
        figure="bytes_to_host",
        lost=(_lbfgs, "classifier", "LBFGS evaluates"),
    ),
    "ProgressiveLayerDropping": Case(
        active=lambda: eff.ProgressiveLayerDropping(theta_min=0.3, gamma=20.0),
        neutral=lambda: eff.ProgressiveLayerDropping(theta_min=1.0),
        lost=(_no_blocks, "classifier", "no stack of repeated blocks"),
    ),
    "ProgressiveStacking": Case(
        active=lambda: eff.ProgressiveStacking(stages=[(0.0, 1), (0.25, 2), (0.6, 4)]),
        neutral=lambda: eff.ProgressiveStacking(stages=[(0.0, 4)]),
        on_classifier=lambda: eff.ProgressiveStacking(stages=[(0.0, 1), (0.5, 3)]),
        lost=(_no_blocks, "classifier", "no stack of repeated blocks"),
    ),
    "Rematerialization": Case(
        active=lambda: eff.Rematerialization(policy="optimal", memory_budget=0.65),
        neutral=lambda: eff.Rematerialization(policy="optimal", memory_budget=1.0),
        exact=True,
        figure="recomputed_calls",
        saves_less=True,
        refuses_manual=True,
        on_classifier=lambda: eff.Rematerialization(),
        lost=(_no_blocks, "classifier", "no stack of repeated blocks"),
    ),
    "ReplaceOptimizer": Case(
        active=lambda: eff.ReplaceOptimizer(partial(eff.Muon, momentum=_rising), group_lr={"vector": 2e-2}),
        neutral=lambda: eff.ReplaceOptimizer(),
        own_optimizer=True,
        lost=(_no_blocks, "classifier", "no hidden matrix among the .* parameters of its SGD"),
    ),
    "SelectiveBackprop": Case(
        active=lambda: eff.SelectiveBackprop(keep=0.5, history=16),
        neutral=lambda: eff.SelectiveBackprop(keep=1.0),
        lost=(_own_loss, "classifier", "sample_loss"),
    ),
    "SequenceLengthWarmup": Case(
        active=lambda: eff.SequenceLengthWarmup(start=8, until=0.7),
        neutral=lambda: eff.SequenceLengthWarmup(start=8, until=0.0),
        lost=(_classifier, "classifier", "keys="),
    ),
    "SharpnessAwareMinimization": Case(
        active=lambda: eff.SharpnessAwareMinimization(rho=0.1),
        neutral=lambda: eff.SharpnessAwareMinimization(rho=0.0),
    ),
}

# Techniques that are not exported: they stand in for others in the control arms of a comparison.
STAND_INS: dict[str, Case] = {
    "RandomSubset": Case(active=lambda: RandomSubset(keep=0.5), neutral=lambda: RandomSubset(keep=1.0)),
    "Shallower": Case(
        active=lambda: Shallower(kept=_half),
        neutral=lambda: Shallower(kept=_all),
        lost=(_no_blocks, "classifier", "no stack of repeated blocks"),
    ),
    "ShortSequences": Case(
        active=lambda: ShortSequences(start=8),
        neutral=lambda: ShortSequences(start=32),
        lost=(_classifier, "classifier", "keys="),
    ),
}

ALL: dict[str, Case] = {**CASES, **STAND_INS}
