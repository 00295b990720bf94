"""Compressed activations as a precision plugin around another one (ActNN: Chen et al. 2021, arXiv:2104.14129)."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff.memory._compression.arguments import check_arguments, check_not_compiled
from lightning_eff.memory._compression.engine import Engine, Ledger

_INNER: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "64-true": DoublePrecision,
    "16-true": lambda: HalfPrecision("16-true"),
    "bf16-true": lambda: HalfPrecision("bf16-true"),
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),  # the device is set where the module is seen
}


class ACTPrecision(Precision):
    """Train with another precision plugin, and hold what the forward pass saves in 8, 4 or 2 bits an element.

    ``Trainer(plugins=[ACTPrecision(bits=4, inner="bf16-mixed")])``. What is compressed and how is what
    :class:`lightning_eff.ActivationCompression` says of itself, apart from the batch, which a plugin does not see: its
    floating-point tensors are compressed where an operation saves them. The callback form can do more (``bits="auto"``,
    ``layers``, logging); this one works with trainers whose callbacks are not one's own to choose.

    Everything but the training step's forward pass is the inner plugin's: casts, autocast, loss scaling, clipping and
    its state in checkpoints. A checkpoint saved with the inner plugin alone can be resumed with this one.

    Attributes:
        inner: the plugin inside.
        ledger: the bytes that the last training step held between forward and backward, by category.

    Args:
        bits: 8, 4 or 2.
        inner: "32-true", "64-true", "16-true", "bf16-true" or "bf16-mixed", or a Precision plugin, such as
            ``MixedPrecision("16-mixed", "cuda")``. Tensors in float64 are not compressed.
        method: "group", the only one.
        group_size: elements that share scale and minimum, a power of two from 16 to 8192.
        stochastic_rounding: round up with the probability that makes the mean right; else to nearest, which is biased.

    Raises:
        ValueError: if an argument is out of range; at setup, if a submodule is compiled.
        TypeError: if ``inner`` is neither a name nor a Precision plugin, or is such a plugin as this one.
    """

    def __init__(
        self,
        bits: Literal[2, 4, 8] = 4,
        inner: str | Precision = "32-true",
        *,
        method: Literal["group"] = "group",
        group_size: int = 256,
        stochastic_rounding: bool = True,
    ) -> None:
        check_arguments("ACTPrecision", bits=bits, method=method, group_size=group_size)
        if bits not in (2, 4, 8):
            raise ValueError(
                f"ACTPrecision({bits=}): expected 8, 4 or 2 bits. Sensitivities for 'auto' take passes of their own,"
                " which a precision plugin cannot run: use ActivationCompression(bits='auto')."
            )
        if isinstance(inner, str) and inner not in _INNER:
            raise ValueError(
                f"ACTPrecision({inner=}): expected one of {', '.join(_INNER)}, or a Precision plugin, such as"
                " MixedPrecision('16-mixed', 'cuda')."
            )
        if not isinstance(inner, str | Precision) or isinstance(inner, ACTPrecision):
            raise TypeError(
                f"ACTPrecision(inner of {type(inner).__name__}): expected a precision's name, or a plugin that is no"
                " ACTPrecision itself."
            )
        self._named = isinstance(inner, str)
        self.inner: Precision = _INNER[inner]() if isinstance(inner, str) else inner
        self.precision = self.inner.precision
        self.compresses = bits
        self.group_size = group_size
        self.stochastic_rounding = stochastic_rounding
        self._module: nn.Module | None = None
        self._engine: Engine | None = None
        self._seed: int | None = None
        self._passes = 0

    @property
    def ledger(self) -> Ledger:
        return Ledger() if self._engine is None else self._engine.ledger

    @property
    def scaler(self) -> Any:
        """The inner plugin's gradient scaler, if it has one."""
        return getattr(self.inner, "scaler", None)

    # -- what is added

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        self._place()
        with self.inner.train_step_context():
            if self._module is None:  # outside of a Trainer
                yield
                return
            if self._engine is None:
                self._engine = Engine(
                    self._module, bits=self.compresses, group_size=self.group_size, stochastic=self.stochastic_rounding
                )
            self._passes += 1
            with self._engine.forward(self._next_seed(), ()):
                yield

    def _next_seed(self) -> int:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._seed is None:
            seed = [torch.initial_seed() % 2**63]
            if distributed:
                torch.distributed.broadcast_object_list(seed)
            self._seed = seed[0]
        rank = torch.distributed.get_rank() if distributed else 0
        return rng.keyed_generator(self._seed, "act_precision", rank, self._passes).initial_seed()

    def _place(self) -> None:
        """A plugin made from its name is of the device that the module is on by now."""
        if self._named and isinstance(self.inner, MixedPrecision) and self._module is not None:
            self.inner.device = next((p.device.type for p in self._module.parameters()), "cpu")

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        module = self.inner.convert_module(module)
        check_not_compiled("ACTPrecision", module)
        self._module, self._engine = module, None
        return module

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "seed": self._seed, "passes": self._passes}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self._seed, self._passes = state_dict["seed"], state_dict["passes"]

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.inner.on_load_checkpoint(checkpoint)
        alone = checkpoint.get(type(self.inner).__qualname__)
        if alone is not None and type(self).__qualname__ not in checkpoint:
            self.inner.load_state_dict(alone)

    @override
    def teardown(self) -> None:
        self.inner.teardown()
        self._module = self._engine = None

    # -- what is handed on

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        return self.inner.connect(model, optimizers, lr_schedulers)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        self._place()
        return self.inner.forward_context()

    @override
    def val_step_context(self) -> Any:
        self._place()
        return self.inner.val_step_context()

    @override
    def test_step_context(self) -> Any:
        self._place()
        return self.inner.test_step_context()

    @override
    def predict_step_context(self) -> Any:
        self._place()
        return self.inner.predict_step_context()

    @override
    def convert_input(self, data: Any) -> Any:
        return self.inner.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        return self.inner.convert_output(data)

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        return self.inner.pre_backward(tensor, module)

    @override
    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.inner.backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        return self.inner.post_backward(tensor, module)

    @override
    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        return self.inner.optimizer_step(optimizer, model=model, closure=closure, **kwargs)

    @override
    def main_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        return self.inner.main_params(optimizer)

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self.inner.unscale_gradients(optimizer)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        self.inner.clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.inner.clip_grad_by_value(optimizer, clip_val)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.inner.clip_grad_by_norm(optimizer, clip_val)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.inner.on_save_checkpoint(checkpoint)
