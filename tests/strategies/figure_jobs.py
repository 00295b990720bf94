"""What two processes run to compare techniques' further settings, and what they report, with one process."""

import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import lightning_eff as eff
from lightning_eff._core.technique import Technique
from tests.models import Samples, trainer
from tests.strategies.technique_jobs import STRATEGIES, Course, without_noise


class Setting(NamedTuple):
    """A technique as it is compared: on which module, in which layouts, and which of its figures."""

    technique: Callable[[], Technique]
    model: str
    layouts: tuple[str, ...] = ("pipeline",)
    figures: tuple[str, ...] = ()
    ignored: bool = False
    trains: str = ""
    head: str = ""  # "tied": the head has the embedding's weight; "product": it is a product with that
    window: int = 1  # of accumulated batches, of which one process has a single batch


HEAD = ("rows", "logits_bytes", "ignored_share")
SPLIT = ("shard", "tensor", "pipeline")
SETTINGS = {
    "noise": Setting(eff.GradientNoiseScale, "tiny_gpt", SPLIT, ("signal", "noise", "steps", "batch")),
    "noise over windows": Setting(
        lambda: eff.GradientNoiseScale(half_life=2.0),
        "tiny_gpt",
        SPLIT,
        ("signal", "noise", "steps", "batch"),
        window=2,
    ),
    "blocks of samples": Setting(lambda: eff.StochasticDepth(drop=0.6, mode="sample"), "tiny_gpt"),
    "blocks alone": Setting(
        lambda: eff.StochasticDepth(drop=0.9), "tiny_gpt", (*SPLIT,), ("layers_dropped",), trains="blocks"
    ),
    "smoothed": Setting(lambda: eff.LabelSmoothing(epsilon=0.2), "padded", ("tensor", "pipeline")),
    "mixed with ignored labels": Setting(eff.Mixup, "classifier", ignored=True),
    "drawn with ignored labels": Setting(lambda: eff.LossBiasedSampling(presample=2.0), "padded"),
    "accuracy": Setting(eff.OrderedSGD, "classifier", figures=("accuracy",)),
    "head": Setting(eff.FusedLinearCrossEntropy, "padded", ("tensor", "pipeline"), HEAD),
    "head of GPT-2": Setting(eff.FusedLinearCrossEntropy, "gpt2", ("tensor",), HEAD),
    "tied head": Setting(eff.FusedLinearCrossEntropy, "tiny_gpt", ("tensor",), HEAD, head="tied"),
    "head of the embedding": Setting(eff.FusedLinearCrossEntropy, "tiny_gpt", ("tensor",), HEAD, head="product"),
}
STEPS = 10


class _Product(nn.Module):
    """A head that reads the embedding's weight."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.__dict__["embedding"] = embedding  # whose parameters it has not

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedding: Any = self.embedding
        return F.linear(x, embedding.weight)


class _Some(Samples):
    """Samples of which some have no label: of some micro-batches all, of their mixtures others."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name, size)
        self.batch[1][torch.tensor([0, 12, 13, 14, 15, 17, 23, 30, 40, 41, 42, 43, 50])] = -100


def _run(name: str, layout: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, float]]:
    """Losses, weights and figures; one process has batches as large as those of all replicas together."""
    setting = SETTINGS[name]
    size = 4 if layout == "shard" else 8 * setting.window if layout == "one" else 8
    pl.seed_everything(3, verbose=False)
    net: Any = without_noise(setting.model)
    course, technique = Course(), setting.technique()
    if setting.head == "tied":
        net.head.weight = net.embed.weight
    elif setting.head == "product":
        net.head = _Product(net.embed)
    if setting.trains:
        for path, p in net.named_parameters():
            p.requires_grad_(path.startswith(setting.trains))
        net.configure_optimizers = lambda: torch.optim.SGD(  # pyright: ignore[reportAttributeAccessIssue]
            [p for p in net.parameters() if p.requires_grad], lr=0.05
        )
    data = (_Some if setting.ignored else Samples)(setting.model, 64)
    t = trainer(
        technique,
        course,
        max_steps=STEPS,
        strategy=STRATEGIES[layout](),
        use_distributed_sampler=False,
        devices=1 if layout == "one" else 2,
        accumulate_grad_batches=1 if layout == "one" else setting.window,
    )
    own = DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False) if layout == "shard" else None
    t.fit(net, DataLoader(data, size, sampler=own))
    report = technique.report()
    figures = {key: float(report[key]) for key in setting.figures}
    # a replica's loss is that of its own samples, and a window's batches have one each
    losses = [] if layout == "shard" or setting.window > 1 else course.losses
    return losses, {k: v.detach().clone() for k, v in net.state_dict().items()}, figures


def compared(names: list[str]) -> dict[str, Any]:
    """For each setting and layout, each rank's distances from one process: of losses, of weights and of figures."""
    warnings.filterwarnings("ignore")
    found: dict[str, Any] = {}
    for name in names:
        losses, weights, figures = _run(name, "one")
        for layout in SETTINGS[name].layouts:
            got, held, told = _run(name, layout)
            mine = {
                "losses": max([abs(x - y) for x, y in zip(losses, got, strict=layout != "shard")], default=0.0),
                "weights": max(float((weights[path] - held[path]).abs().max()) for path in weights),
                "figures": {key: [figures[key], told[key]] for key in figures},
            }
            every: list[Any] = [None, None]
            torch.distributed.all_gather_object(every, mine)
            found[f"{name} {layout}"] = every
    return found
