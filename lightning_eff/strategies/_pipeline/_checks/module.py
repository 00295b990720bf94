"""Checks of a module for a pipeline before anything runs."""

import lightning.pytorch as pl
from torch import nn

from lightning_eff._core._lightning.names import is_a, is_overridden
from lightning_eff.strategies._pipeline.order import SPLIT_BACKWARD
from lightning_eff.strategies._pipeline.stack import Stack


def check_module(module: nn.Module, *, who: str) -> None:
    """Raise ``ValueError`` if the module runs backward passes itself."""
    name = type(module).__name__
    if getattr(module, "automatic_optimization", True) is False:
        raise ValueError(
            f"{who}: {name} has automatic_optimization=False, but the schedule runs the"
            " backward pass of each micro-batch itself. Use automatic optimization, or pipeline_parallel_size=1."
        )
    if is_a(module, pl.LightningModule) and is_overridden("backward", module):
        raise ValueError(
            f"{who}: {name} overrides backward, but the schedule runs the"
            " backward pass of each micro-batch itself. Remove the override, or use pipeline_parallel_size=1."
        )


def check_compiled(stack: Stack, schedule: str, *, who: str) -> None:
    """Raise ``ValueError`` if blocks are compiled modules under a schedule that splits the backward pass."""
    wrapped = [i for i, block in enumerate(stack.blocks) if "_orig_mod" in block._modules]
    if schedule in SPLIT_BACKWARD and wrapped:
        raise ValueError(
            f"{who}(schedule={schedule!r}): block {wrapped[0]} of {stack.path!r} is a torch.compile'd"
            " module, which PyTorch's schedules with a split backward pass do not support. Compile in place by"
            " block.compile(), or use GPipe, 1F1B, Interleaved1F1B or LoopedBFS."
        )
