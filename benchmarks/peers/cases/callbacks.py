"""Light callbacks beside a bare step, the set-up of adapters beside peft's, and recomputation beside torch's own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import fit_arm
from benchmarks.peers.modules import Encoder

LAYERS = 1000
Callbacks = Callable[[], Sequence[Callback]]


def _tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 64, 128), torch.randint(64, (4, 64))


def _beside_empty(callbacks: Callbacks) -> Callable[[], tuple[Arm, Arm]]:
    """Ours beside as many callbacks that do nothing, which Lightning calls as well."""

    def build() -> tuple[Arm, Arm]:
        ours = list(callbacks())
        empty = [Callback() for _ in ours]
        return fit_arm(Encoder(), _tokens(), ours), fit_arm(Encoder(), _tokens(), empty)

    return build


def _scheduling() -> list[Callback]:
    return [
        eff.LearningRateSchedule("cosine"),
        eff.LatestWeightAveraging(),
        eff.LabelSmoothing(0.1),
        eff.GradientNoiseScale(),
        eff.EfficiencyMonitor(),
    ]


def _averaging() -> list[Callback]:
    return [
        eff.LearningRateSchedule("cosine"),
        eff.ExponentialMovingAverage(half_life=0.1),
        eff.ProgressiveLayerDropping(theta_min=0.5),
        eff.GradientNoiseScale(),
        eff.EfficiencyMonitor(),
    ]


class Layers(nn.Module):
    """Many small linear layers."""

    def __init__(self, count: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(8, 8), "v": nn.Linear(8, 8)}) for _ in range(count // 2)
        )


def _set_up() -> tuple[Arm, Arm]:
    import peft

    def peers() -> nn.Module:
        return peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["q", "v"]), Layers())

    return Arm(lambda: eff.apply(Layers(), eff.LoRA(rank=4, target_modules=["q", "v"]))), Arm(peers)


class Checkpointed(Encoder):
    """Recomputes each block with torch's own function."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x).transpose(1, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


def _recomputing() -> tuple[Arm, Arm]:
    ours = fit_arm(Encoder(), _tokens(), [eff.Rematerialization("full")])
    return ours, fit_arm(Checkpointed(), _tokens())


def cases() -> list[Case]:
    return [
        Case(
            "five light callbacks: schedule, LAWA, smoothing, noise scale, monitor",
            "LearningRateSchedule",
            "five empty callbacks",
            "lightning",
            _beside_empty(_scheduling),
            goal=1.10,
        ),
        Case(
            "five light callbacks: schedule, EMA, layer dropping, noise scale, monitor",
            "LearningRateSchedule",
            "five empty callbacks",
            "lightning",
            _beside_empty(_averaging),
            goal=1.10,
        ),
        Case(
            "one light callback: schedule",
            "LearningRateSchedule",
            "one empty callback",
            "lightning",
            _beside_empty(lambda: [eff.LearningRateSchedule("cosine")]),
            goal=1.05,
        ),
        Case(
            "LoRA, set-up of 1,000 layers",
            "LoRA",
            "peft.inject_adapter_in_model",
            "peft",
            _set_up,
            "set-up",
            goal=1.0,
            rounds=8,
        ),
        Case(
            "recomputation of each block",
            "Rematerialization",
            "torch.utils.checkpoint",
            "torch",
            _recomputing,
            goal=1.05,
        ),
    ]
