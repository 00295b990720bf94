"""Optimizer states in few bits, stochastic rounding, and products in low precision."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import fit_arm
from benchmarks.peers.modules import Perceptron

WIDTH, BATCH = 512, 64


class AdamW(Perceptron):
    """Trained by AdamW, or by an optimizer that is given."""

    def __init__(self, optimizer: Callable[[Any], Any] | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(WIDTH, 4)
        self.make = optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-4))
        self.to(dtype)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))


def _states(bits: int, package: str) -> Callable[[], tuple[Arm, Arm]]:
    def build() -> tuple[Arm, Arm]:
        def make(params: Any) -> Any:
            if package == "bitsandbytes":
                from bitsandbytes.optim import AdamW8bit
            elif bits == 8:
                from torchao.optim import AdamW8bit
            else:
                from torchao.optim import AdamW4bit as AdamW8bit
            return AdamW8bit(params, lr=1e-4)

        batch = _batch()
        return fit_arm(AdamW(), batch, [eff.EightBitOptimizer(bits)]), fit_arm(AdamW(make), batch)

    return build


def _rounded() -> tuple[Arm, Arm]:
    from torchao.optim import _AdamW

    def make(params: Any) -> Any:
        return _AdamW(params, lr=1e-4, bf16_stochastic_round=True)

    batch = _batch()
    return (
        fit_arm(AdamW(), batch, plugins=[eff.StochasticRoundingBF16()]),
        fit_arm(AdamW(make), batch, precision="bf16-true"),
    )


def _integers() -> tuple[Arm, Arm]:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    batch, peer = _batch(), AdamW()
    quantize_(peer.layers, int8_mixed_precision_training(module_swap=True))
    return (
        fit_arm(AdamW(), batch, plugins=[eff.INT8Precision(skip=())]),
        fit_arm(peer, batch, precision="bf16-mixed"),
    )


def _floats() -> tuple[Arm, Arm]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    batch, peer = _batch(), AdamW()
    converted: nn.Module = convert_to_float8_training(peer.layers, config=Float8LinearConfig(emulate=True))
    peer.layers = converted  # type: ignore[assignment]
    return (
        fit_arm(AdamW(), batch, plugins=[eff.FP8Precision(skip=(), backend="emulated")]),
        fit_arm(peer, batch, precision="bf16-mixed"),
    )


def cases() -> list[Case]:
    return [
        Case(
            "AdamW, 8-bit states",
            "EightBitOptimizer",
            "bitsandbytes.optim.AdamW8bit",
            "bitsandbytes",
            _states(8, "bitsandbytes"),
        ),
        Case(
            "AdamW, 8-bit states, beside torchao",
            "EightBitOptimizer",
            "torchao.optim.AdamW8bit",
            "torchao",
            _states(8, "torchao"),
        ),
        Case("AdamW, 4-bit states", "EightBitOptimizer", "torchao.optim.AdamW4bit", "torchao", _states(4, "torchao")),
        Case(
            "bfloat16 with stochastic rounding", "StochasticRoundingBF16", "torchao.optim._AdamW", "torchao", _rounded
        ),
        Case("INT8 linear layers", "INT8Precision", "torchao int8_mixed_precision_training", "torchao", _integers),
        Case("FP8 linear layers, emulated", "FP8Precision", "torchao convert_to_float8_training", "torchao", _floats),
    ]
