"""Arguments that are functions: a config may name any, whether or not its return is annotated."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from torch import Tensor

if TYPE_CHECKING:
    SampleLoss = Callable[[LightningModule, Any], Tensor]
    TensorFunction = Callable[[Tensor], Tensor]
else:  # where a class is to be returned, jsonargparse takes no function that does not say so
    SampleLoss = Callable[[LightningModule, Any], Any]
    TensorFunction = Callable[[Tensor], Any]
