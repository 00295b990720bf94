"""Compilation, beside torch's own."""

import torch

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import fit_arm
from benchmarks.peers.modules import Encoder


def _compiled() -> tuple[Arm, Arm]:
    batch, peer = (torch.randn(4, 64, 128), torch.randint(64, (4, 64))), Encoder(depth=3)
    for block in peer.blocks:
        block.compile()
    return fit_arm(Encoder(depth=3), batch, [eff.RegionalCompilation()]), fit_arm(peer, batch)


def cases() -> list[Case]:
    return [
        Case(
            "compiled blocks",
            "RegionalCompilation",
            "torch Module.compile of each block",
            "torch",
            _compiled,
            goal=1.05,
        ),
    ]
