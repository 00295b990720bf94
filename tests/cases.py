"""One case for each exported technique and each stand-in: how the contract's tests set it up, and what it must refuse.

A case stands beside its technique's own tests, in their file: ``CASES = {"Technique": Case(...)}``.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import lightning.pytorch as pl

import lightning_eff
from lightning_eff._core.technique import Technique
from tests.beside import SideOutputs, beside


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
        yields: of an exact technique, whether it leaves a run as it is, with a warning, where another one of most stacks needs
            what it would change.
        rounds: whether weights are those of plain training but for rounding, which coarser arithmetic beside it may hide; of
            an exact technique, whether that is so beside others.
        lossy: whether what it computes depends on which tensors autograd saves.
        saves_less: whether autograd saves other tensors with it.
        own_optimizer: whether its checkpoints hold the state of another optimizer than the module's, which a plain run
            refuses to go on from.
        idle: models of ``tests.models`` whose batches leave it nothing to do, so that it is plain training there.
        refuses: models of ``tests.models`` on which ``active`` is refused, with what the error must say.
        neutral_by_machine: whether it is the machine, and not its settings, that decides if it is neutral.
        refuses_manual: whether these settings refuse manual optimization; None where the class says it.
        on_classifier: builds it for ``classifier``, where ``active`` does not suit that module.
        neutral_on_classifier: ``neutral`` for ``classifier``, where that does not suit it.
        architecture: whether its purpose is other parameters: its checkpoints are then those of ``apply(plain)``.
        partial: of an architecture, whether its checkpoints hold what trains alone: with the frozen parameters of
            ``apply(plain)`` they are whole.
        stays: of an architecture that ``export`` cannot make plain again, what the error must say.
        anywhere: whether it acts on weights or samples that every module has, so that there is nothing to be found.
        lost: otherwise, a module on which it can find nothing to act on, with what the error must say.
        as_is: builds it for ``lost``, where ``active`` is made for modules as small as that.
    """

    active: Callable[[], Technique]
    neutral: Callable[[], Technique]
    model: str = "tiny_gpt"
    exact: bool = False
    figure: str = ""
    yields: bool = False
    rounds: bool = False
    lossy: bool = False
    saves_less: bool = False
    own_optimizer: bool = False
    idle: tuple[str, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)
    neutral_by_machine: bool = False
    refuses_manual: bool | None = None
    on_classifier: Callable[[], Technique] | None = None
    neutral_on_classifier: Callable[[], Technique] | None = None
    architecture: bool = False
    partial: bool = False
    stays: str = ""
    anywhere: bool = False
    lost: tuple[Callable[[], pl.LightningModule], str, str] | None = None
    as_is: Callable[[], Technique] | None = None

    @property
    def too_small(self) -> bool:
        """Whether ``classifier`` is a module on which it finds nothing."""
        return self.lost is not None and self.lost[0] is classifier and self.as_is is None


def no_blocks() -> pl.LightningModule:
    from torch import nn

    from tests.models import TinyClassifier

    module = TinyClassifier()
    module.blocks = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    module.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 3))
    return module


def own_loss() -> pl.LightningModule:
    import torch

    from tests.models import TinyClassifier

    class OwnLoss(TinyClassifier):
        def training_step(self, batch, batch_idx):
            return torch.logsumexp(self(batch[0]), dim=1).mean()

    return OwnLoss()


def no_map() -> pl.LightningModule:
    import torch
    import torch.nn.functional as F

    class Scaled(pl.LightningModule):
        """No map: a scale for each feature."""

        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8))

        def training_step(self, batch, batch_idx):
            return F.cross_entropy((batch[0] * self.scale)[:, :3], batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return Scaled()


def classifier() -> pl.LightningModule:
    from tests.models import TinyClassifier

    return TinyClassifier()


#: Techniques that need a library of an extra, by that: they have no case where it is not installed.
NEEDS = {
    "ScheduleFree": "schedulefree",
    **dict.fromkeys(("EightBitOptimizer", "QuantizedBase"), "bitsandbytes"),
    **dict.fromkeys(("AugMix", "AutoAugment", "RandAugment"), "kornia"),
}
MISSING = {name for name, library in NEEDS.items() if importlib.util.find_spec(library) is None}

ALL: SideOutputs[Case] = SideOutputs(beside("CASES", of="tests.cases.Case"), "CASES")
ALL = ALL.only(set(ALL) - MISSING)
CASES = ALL.only(set(lightning_eff.__all__))
# Techniques that are not exported: they stand in for others in the control arms of a comparison.
STAND_INS = ALL.only(set(ALL) - set(CASES))
# Techniques of the tests alone, which show a way in that no exported technique has yet.
EXAMPLES: SideOutputs[Case] = SideOutputs(beside("EXAMPLES", of="tests.cases.Case"), "EXAMPLES")


def case_of(name: str) -> Case:
    """The case of a technique, be it exported, a stand-in or of the tests alone."""
    return ALL[name] if name in ALL else EXAMPLES[name]
