"""Types of arguments that are functions. A config may name any function, with or without an annotated result."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_eff._core._arguments.kinds import Function

_LOSSES = Function("(module, batch) that returns one loss per sample, shape (B,)")
_TENSOR = Function("a tensor that returns a tensor")

if TYPE_CHECKING:
    SampleLoss = Annotated[Callable[[LightningModule, Any], Tensor], _LOSSES]
    TensorFunction = Annotated[Callable[[Tensor], Tensor], _TENSOR]
else:  # jsonargparse refuses functions without an annotated result if it is a class
    SampleLoss = Annotated[Callable[[LightningModule, Any], Any], _LOSSES]
    TensorFunction = Annotated[Callable[[Tensor], Any], _TENSOR]
