"""Small modules and steps that several cases share. All of them are made from one seed."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.case import Arm
from examples.vit.module import EncoderBlock

__all__ = ["Convolutions", "Encoder", "Perceptron", "of_optimizer", "optimizer_arm", "step_of", "weights"]


class Trained(LightningModule):
    """Steps on a cross-entropy."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)


class Perceptron(Trained):
    """Residual linear layers, (B, D) to (B, D)."""

    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


class Encoder(Trained):
    """Transformer blocks and a head, (B, N, D) to (B, K, N)."""

    def __init__(self, width: int = 128, depth: int = 4, classes: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(EncoderBlock(width, 4, 0.0) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).transpose(1, 2)


class Convolutions(Trained):
    """Convolutions with BatchNorm, (B, 3, H, W) to (B, K)."""

    def __init__(self, width: int = 32, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(depth):
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def step_of(module: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor] | None = None) -> Arm:
    """An arm of a forward and a backward pass. It keeps what trains.

    Args:
        module: to run, or a LightningModule.
        batch: of every step.
        loss: of the module and the batch; by default that of ``training_step``.
    """

    def step() -> None:
        found = loss(module, batch) if loss is not None else module.training_step(batch, 0)  # type: ignore[operator]
        found.backward()
        for p in module.parameters():
            p.grad = None

    return Arm(step, lambda: [p for p in module.parameters() if p.requires_grad])


def weights(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters with gradients."""
    torch.manual_seed(0)
    made = [nn.Parameter(0.02 * torch.randn(shape, dtype=dtype)) for shape in shapes]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def of_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors in an optimizer's state, quantized ones by their parts."""
    found: list[Tensor] = []

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for one in value.values():
                add(one)
        elif isinstance(value, Tensor) and type(value) is not Tensor and hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:  # type: ignore[operator]
                add(getattr(value, name))
        elif isinstance(value, Tensor):
            found.append(value)

    for state in optimizer.state.values():
        add(state)
    return found


def optimizer_arm(optimizer: torch.optim.Optimizer, state: Callable[[], list[Tensor]] | None = None) -> Arm:
    """An arm of an optimizer's step."""
    return Arm(optimizer.step, state or (lambda: of_optimizer(optimizer)))
