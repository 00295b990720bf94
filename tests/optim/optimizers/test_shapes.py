"""Optimizers move each of many tensors as if it were alone, whatever the shapes, dtypes and chunks beside it."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff import LAMB, LARS, SOAP, ACClip, Adan, Lion, Muon, Shampoo
from lightning_eff._core._optim import chunks
from lightning_eff.optim.optimizers import _runs
from lightning_eff.optim.optimizers._muon import orthogonalization, steps
from lightning_eff.optim.optimizers._two_sided import rule
from tests.optim.optimizers.test_muon import Reference

MATRICES = {"Muon": Muon, "SOAP": SOAP, "Shampoo": Shampoo}
OTHERS = {"ACClip": ACClip, "Adan": Adan, "LAMB": LAMB, "LARS": LARS, "Lion": Lion}
SIDES = (1, 2, 3, 5, 7, 31, 64, 65, 67)
RTOL = {torch.float32: 1e-3, torch.bfloat16: 0.05}


def odd_shapes(chance: random.Random) -> list[tuple[int, ...]]:
    """Matrices of odd, tall, wide and single rows and columns, convolutions, and vectors; one large matrix at least."""
    found: list[tuple[int, ...]] = [(chance.choice((65, 67)), chance.choice((65, 129)))]
    for _ in range(chance.randint(1, 5)):
        kinds = [(chance.choice(SIDES), chance.choice(SIDES)), (chance.choice(SIDES), 3, 1, 5), (chance.choice(SIDES),)]
        found.insert(chance.randint(0, len(found)), chance.choice(kinds))
    return found


def drawn(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def settings_of(name: str, chance: random.Random) -> dict[str, Any]:
    given: dict[str, Any] = {
        "Muon": {"normalization": chance.choice((None, "neuron")), "nesterov": chance.random() < 0.7},
        "SOAP": {"refresh_steps": 2, "merge": chance.choice((1, 1024)), "vectors": chance.random() < 0.5},
        "Shampoo": {"root_steps": 2, "block_size": chance.choice((4, 64, 1024)), "vectors": chance.random() < 0.5},
    }
    given["Muon"]["adam"] = {"lr": 0.1}
    return {"lr": 0.1, "weight_decay": 0.1, **given.get(name, {})}


def optimizer_of(name: str, params: list[nn.Parameter], settings: dict[str, Any]) -> torch.optim.Optimizer:
    if name in OTHERS:
        return OTHERS[name](params, **settings)
    if not any(p.ndim > 1 for p in params):
        params = [*params, nn.Parameter(torch.zeros(2, 2))]  # a matrix without gradients, which they require
    return MATRICES[name](params, **settings)


@pytest.mark.parametrize("name", sorted(MATRICES | OTHERS))
def test_each_tensor_moves_as_if_it_were_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orthogonalization, "multiplies_bfloat16", lambda: True)
    chance = random.Random(0)
    for seed in range(8):
        shapes, settings = odd_shapes(chance), settings_of(name, chance)
        dtypes = [chance.choice((torch.float32, torch.bfloat16)) if seed % 2 else torch.float32 for _ in shapes]
        limit = chance.choice((64, 20_000, 2**22))
        before = drawn(shapes, dtypes, seed)
        many, alone = ([nn.Parameter(t.clone()) for t in before] for _ in range(2))
        optimizer, each = optimizer_of(name, many, settings), [optimizer_of(name, [p], settings) for p in alone]
        for step in range(3):
            for p, q, grad in zip(many, alone, drawn(shapes, dtypes, 100 + step), strict=True):
                p.grad, q.grad = grad, grad.clone()
            with monkeypatch.context() as patch:
                patch.setattr(chunks, "chunk_size", lambda device, limit=limit: limit)
                for module in (_runs, rule, steps):
                    patch.setattr(module, "limit_of", lambda tensor, limits, limit=limit: limit)
                optimizer.step()
            for one in each:
                one.step()
        for p, q, old in zip(many, alone, before, strict=True):
            assert not torch.equal(q, old)
            near = RTOL[p.dtype] * float((q.detach() - old).abs().max()) + torch.finfo(p.dtype).eps * float(
                old.abs().max()
            )
            torch.testing.assert_close(p, q, rtol=0, atol=near)


def test_muons_rule_holds_for_odd_shapes_together() -> None:
    """Against the rule written out for one matrix at a time, in float64."""
    chance = random.Random(1)
    for seed in range(6):
        shapes = [shape for shape in odd_shapes(chance) if len(shape) == 2]
        g = torch.Generator().manual_seed(seed)
        ours, theirs = [], []
        for shape in shapes:
            p = torch.randn(shape, generator=g)
            ours.append(nn.Parameter(p))
            theirs.append(nn.Parameter(p.double()))
        settings: dict[str, Any] = {"orthogonalization": "newton_schulz", "cautious": False, "split": None}
        optimizer = Muon(ours, 0.02, weight_decay=0.1, momentum=0.9, dtype="float32", **settings)
        reference = Reference(theirs, 0.02, 0.1, 0.9, nesterov=True, scale="spectral")
        for _ in range(3):
            for p, q in zip(ours, theirs, strict=True):
                p.grad = torch.randn(p.shape, generator=g)
                q.grad = p.grad.double()
            optimizer.step()
            reference.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.double(), q, rtol=0, atol=2e-5)
