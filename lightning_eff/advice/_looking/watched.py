"""The observations of a run, before anything is concluded from them."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_eff.advice._looking.clock import Times
from lightning_eff.advice._looking.frames import Place
from lightning_eff.advice._looking.parameters import Gradients
from lightning_eff.advice._looking.rates import Rates
from lightning_eff.advice._looking.seen import Seen


@dataclass
class NotFinite:
    """The first loss that is no number.

    Attributes:
        step: its number, from 1.
        value: "NaN" or "infinite".
        origin: the line and operation from which it came, where that was seen.
        weights: the parameters that were not finite before.
    """

    step: int
    value: str
    origin: tuple[Place | None, str] | None
    weights: list[str]


@dataclass
class Watched:
    """The observations of a run.

    Attributes:
        steps: training steps so far, where each micro-batch is one.
        updates: optimizer steps.
        close: what each of the steps did that were watched operation by operation.
        asleep: paths in eval mode, how many dropouts and BatchNorms they have, and in how many of these steps.
        awake: the same for train mode in validation.
        bar: metrics of the progress bar by the steps that logged them; ``log`` of the logger.
        padding: positions that are padding and all positions.
        wide: the batch's tensors in float64.
        searches_unused: whether DDP searches for unused parameters.
        no_graph: steps whose loss has no gradient.
    """

    trainer: Trainer
    module: LightningModule
    device: torch.device
    own: frozenset[str]
    times: Times
    gradients: Gradients | None = None
    rates: list[Rates] = field(default_factory=list)
    planned: int | None = None
    by_hand: bool = False
    steps: int = 0
    updates: int = 0
    close: list[Seen] = field(default_factory=list)
    validated: int = 0
    asleep: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    awake: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    bar: Counter[str] = field(default_factory=Counter)
    log: Counter[str] = field(default_factory=Counter)
    bar_rate: int = 0
    log_rate: int = 0
    padding: tuple[int, int] = (0, 0)
    wide: set[str] = field(default_factory=set)
    no_graph: int = 0
    not_finite: NotFinite | None = None
    anomaly: bool = False
    searches_unused: bool = False
    deterministic: bool = False
    validation_batches: int | None = None
    validate_every: int | None = None
