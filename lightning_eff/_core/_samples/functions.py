"""Arguments that are functions: a config may name any, whether or not its return is annotated."""

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
else:  # where a class is to be returned, jsonargparse takes no function that does not say so
    SampleLoss = Annotated[Callable[[LightningModule, Any], Any], _LOSSES]
    TensorFunction = Annotated[Callable[[Tensor], Any], _TENSOR]
