"""Further update rules: Lion, Shampoo, and techniques around another optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import fit_arm
from benchmarks.peers.modules import Convolutions, Perceptron, optimizer_arm, weights

LARGE = [(512, 512)] * 16 + [(512,)] * 16  #: 16 MiB
SMALL = [(64, 64)] * 100 + [(64,)] * 100
CYCLE = 10
PACKAGE = "pytorch_optimizer"


def _pair(ours: Callable[[Any], Any], peer: Callable[[Any], Any], shapes: Sequence[tuple[int, ...]]) -> Any:
    return lambda: (optimizer_arm(ours(weights(shapes))), optimizer_arm(peer(weights(shapes))))


def _lion(params: Any) -> Any:
    from pytorch_optimizer import Lion

    return Lion(params, lr=1e-4, weight_decay=0.1)


def _of_bitsandbytes(params: Any) -> Any:
    from bitsandbytes.optim import Lion32bit

    return Lion32bit(params, lr=1e-4, weight_decay=0.1)


def _shampoo() -> tuple[Arm, Arm]:
    from pytorch_optimizer import ScalableShampoo

    shapes = [(256, 256)] * 8
    peer: Any = ScalableShampoo(
        weights(shapes), start_preconditioning_step=1, preconditioning_compute_steps=CYCLE, block_size=1024
    )
    return _cycle(eff.Shampoo(weights(shapes), root_steps=CYCLE, graft="sgd")), _cycle(peer)


def _cycle(optimizer: torch.optim.Optimizer) -> Arm:
    """All steps from one root of the statistics to the next."""

    def steps() -> None:
        for _ in range(CYCLE):
            optimizer.step()

    return Arm(steps, lambda: _tensors(optimizer.state))


def _tensors(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """All tensors that can be reached from an optimizer's state, where it holds objects of its own."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [] if isinstance(value, nn.Parameter) else [value]
    if isinstance(value, dict):
        inside: list[Any] = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value)
    else:
        inside = list(getattr(value, "__dict__", {}).values())
    return [tensor for one in inside for tensor in _tensors(one, seen)]


def _lookahead() -> tuple[Arm, Arm]:
    from pytorch_optimizer import Lookahead

    class Wrapped(Perceptron):
        def configure_optimizers(self) -> Any:
            return Lookahead(super().configure_optimizers(), k=5, alpha=0.5)

    batch = torch.randn(32, 256), torch.randint(256, (32,))
    return (
        fit_arm(Perceptron(), batch, [eff.Lookahead(5, alpha=0.5)], batches=5),
        fit_arm(Wrapped(), batch, batches=5),
    )


def _centralized() -> tuple[Arm, Arm]:
    from pytorch_optimizer.optimizer import centralize_gradient

    class Centralized(Convolutions):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            centralize_gradient([p.grad for p in self.parameters() if p.grad is not None])

    batch = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    ours = fit_arm(Convolutions(depth=12), batch, [eff.GradientCentralization()])
    return ours, fit_arm(Centralized(depth=12), batch)


def cases() -> list[Case]:
    ours = lambda params: eff.Lion(params, lr=1e-4, weight_decay=0.1)  # noqa: E731
    return [
        Case("Lion, 4M parameters", "Lion", "pytorch_optimizer.Lion", PACKAGE, _pair(ours, _lion, LARGE), goal=1.0),
        Case("Lion, 200 tensors", "Lion", "pytorch_optimizer.Lion", PACKAGE, _pair(ours, _lion, SMALL), goal=1.0),
        Case(
            "Lion beside bitsandbytes",
            "Lion",
            "bitsandbytes.optim.Lion32bit",
            "bitsandbytes",
            _pair(ours, _of_bitsandbytes, LARGE),
            goal=1.0,
        ),
        Case(
            "Shampoo, roots every 10 steps",
            "Shampoo",
            "pytorch_optimizer.ScalableShampoo",
            PACKAGE,
            _shampoo,
            unit="ten steps",
            rounds=10,
            goal=1.0,
        ),
        Case("Lookahead", "Lookahead", "pytorch_optimizer.Lookahead", PACKAGE, _lookahead, unit="five steps"),
        Case(
            "gradient centralization",
            "GradientCentralization",
            "pytorch_optimizer.centralize_gradient",
            PACKAGE,
            _centralized,
        ),
    ]
