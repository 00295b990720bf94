"""Muon and SOAP beside torch's Muon and pytorch-optimizer, on the matrices of a GPT.

The weights are those of transformer blocks with fused queries, keys and values. Their gradients are random and stay the same.
Muon and SOAP split the fused projections, and their peers do not.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from benchmarks.peers.case import Arm, Case
from lightning_eff.optim.optimizers.muon import Muon
from lightning_eff.optim.optimizers.soap import SOAP

__all__ = ["cases"]

#: blocks by width: about 26 MiB of weights from 256 on, and 48 at 1024
BLOCKS = {48: 4, 64: 4, 128: 4, 256: 8, 512: 2, 768: 1, 1024: 1}
SOAP_BLOCKS = {48: 4, 128: 4, 256: 8}


def weights(width: int, blocks: int) -> dict[str, nn.Parameter]:
    """Return the matrices of ``blocks`` blocks by name, with gradients."""
    g = torch.Generator().manual_seed(0)
    shapes = {
        "attention.qkv.weight": (3 * width, width),
        "attention.out.weight": (width, width),
        "mlp.up.weight": (4 * width, width),
        "mlp.down.weight": (width, 4 * width),
    }
    made = {
        f"blocks.{i}.{name}": nn.Parameter(0.02 * torch.randn(shape, generator=g))
        for i in range(blocks)
        for name, shape in shapes.items()
    }
    for p in made.values():
        p.grad = 1e-3 * torch.randn(p.shape, generator=g)
    return made


def arm(optimizer: torch.optim.Optimizer) -> Arm:
    """Return the steps of an optimizer, with the tensors of its state."""

    def state() -> Iterable[Tensor]:
        return [x for held in optimizer.state.values() for x in held.values() if isinstance(x, Tensor)]

    return Arm(optimizer.step, state)


def muon(width: int) -> Callable[[], tuple[Arm, Arm]]:
    """Return a builder of Muon's default step and of torch's."""

    def build() -> tuple[Arm, Arm]:
        ours, theirs = weights(width, BLOCKS[width]), weights(width, BLOCKS[width])
        return arm(Muon(ours.items(), lr=0.02)), arm(torch.optim.Muon(list(theirs.values()), lr=0.02))

    return build


def soap(width: int) -> Callable[[], tuple[Arm, Arm]]:
    """Return a builder of SOAP's step and of pytorch-optimizer's, both with a refresh every ten steps."""

    def build() -> tuple[Arm, Arm]:
        import pytorch_optimizer

        ours, theirs = weights(width, SOAP_BLOCKS[width]), list(weights(width, SOAP_BLOCKS[width]).values())
        peer = pytorch_optimizer.SOAP(theirs, lr=3e-3, precondition_frequency=10)
        return arm(SOAP(ours.items(), lr=3e-3, refresh_steps=10)), arm(peer)

    return build


def cases() -> list[Case]:
    """Return the cases of the matrix optimizers."""
    found = [
        Case(
            f"Muon, width {width}",
            "Muon",
            "torch.optim.Muon",
            "torch",
            muon(width),
            goal=0.95,
            transient_goal=32,
        )
        for width in BLOCKS
    ]
    for width in SOAP_BLOCKS:
        found.append(
            Case(
                f"SOAP, width {width}",
                "SOAP",
                "pytorch_optimizer.SOAP",
                "pytorch-optimizer",
                soap(width),
                goal=1.0,
                transient_goal=32,
            )
        )
    return found
