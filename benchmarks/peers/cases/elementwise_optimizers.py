"""Update rules that treat each weight or each layer alone, beside pytorch-optimizer's and schedulefree's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import fit_arm
from benchmarks.peers.modules import Perceptron, optimizer_arm, weights

_BLOCK = [(256, 256), (256,), (768, 256), (768,), (1024, 256), (1024,), (256, 1024), (256,)]
#: by name, the shapes of 26 MiB of weights in few large tensors, of a GPT's as many, and of 10,000 tensors
SHAPES: dict[str, Sequence[tuple[int, ...]]] = {
    "four large tensors": [(1024, 1664)] * 4,
    "a GPT's 65 tensors": [*_BLOCK * 8, (2000, 256)],
    "10,000 small tensors": [(24, 24), (24,)] * 5000,
}
PACKAGE = "pytorch_optimizer"


def _adan(params: Any) -> Any:
    from pytorch_optimizer import Adan

    return Adan(params, lr=1e-4, weight_decay=0.02)


def _lamb(params: Any) -> Any:
    from pytorch_optimizer import Lamb

    return Lamb(params, lr=1e-4, weight_decay=0.01)


def _lars(params: Any) -> Any:
    from pytorch_optimizer import LARS

    return LARS(params, lr=1e-4, weight_decay=1e-4)


RULES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], float]] = {
    "Adan": (lambda params: eff.Adan(params, lr=1e-4, weight_decay=0.02), _adan, 0.95),
    "LAMB": (lambda params: eff.LAMB(params, lr=1e-4, weight_decay=0.01), _lamb, 1.0),
    "LARS": (lambda params: eff.LARS(params, lr=1e-4, weight_decay=1e-4), _lars, 1.0),
}


def _pair(name: str, shapes: Sequence[tuple[int, ...]]) -> Callable[[], tuple[Arm, Arm]]:
    ours, peer, _ = RULES[name]
    return lambda: (optimizer_arm(ours(weights(shapes))), optimizer_arm(peer(weights(shapes))))


class _AdamW(Perceptron):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Free(Perceptron):
    def configure_optimizers(self) -> Any:
        from schedulefree import AdamWScheduleFree

        optimizer = AdamWScheduleFree(self.parameters(), lr=1e-3)
        optimizer.train()
        return optimizer


def _schedule_free() -> tuple[Arm, Arm]:
    """Steps on one sample, of which the optimizer's part is most."""
    batch = torch.randn(1, 512), torch.randint(512, (1,))
    ours = fit_arm(_AdamW(512, 26), batch, [eff.ScheduleFree(0.9)])
    return ours, fit_arm(_Free(512, 26), batch)


def cases() -> list[Case]:
    """Three rules on three sets of weights, and schedule-free AdamW."""
    rules = [
        Case(
            f"{name}, {kind}",
            name,
            f"pytorch_optimizer.{'Lamb' if name == 'LAMB' else name}",
            PACKAGE,
            _pair(name, shapes),
            goal=goal,
            transient_goal=26,
        )
        for name, (_, _, goal) in RULES.items()
        for kind, shapes in SHAPES.items()
    ]
    free = Case(
        "ScheduleFree with AdamW",
        "ScheduleFree",
        "schedulefree.AdamWScheduleFree",
        "schedulefree",
        _schedule_free,
        goal=1.0,
        transient_goal=26,
    )
    return [*rules, free]
