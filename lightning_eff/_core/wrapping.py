"""A precision plugin around another one, which handles everything that the outer one does not change."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._lightning.names import NoCallback, adapt, is_a, of_both
from lightning_eff._core._surveys.items import InSurveys
from lightning_eff._core.search_space import SearchSpace

NAMES: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "64-true": DoublePrecision,
    "16-true": lambda: HalfPrecision("16-true"),
    "bf16-true": lambda: HalfPrecision("bf16-true"),
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),  # _place sets the module's device
}


_UNROUNDED: list[None] = []


@contextmanager
def unrounded() -> Iterator[None]:
    """Let plugins compute as in the plain module, for code that compares the losses of batches.

    A scale that a batch's samples share would make each sample's loss depend on the others, by a rounding error.
    """
    _UNROUNDED.append(None)
    try:
        yield
    finally:
        _UNROUNDED.pop()


def is_unrounded() -> bool:
    """Return whether :func:`unrounded` is active."""
    return bool(_UNROUNDED)


@of_both
class WrappingPrecision(NoCallback, Precision):
    """Delegates every call to an inner plugin. Subclasses override what they add, and call ``super()``.

    A checkpoint saved with only the inner plugin can be resumed with this one around it. The plugin counts the Trainer's
    backward passes and draws a seed once, and checkpoints hold both. So :meth:`seed` gives a resumed run the numbers of an
    uninterrupted one. Passes that techniques run to measure something are not counted.

    Attributes:
        kind: how it is used, for the table of techniques.
        saves: what it saves, in a few words.
        paper: its source.
        constraints: what it needs or costs, in a few words.
        inner: the plugin inside.

    Args:
        inner: "32-true", "64-true", "16-true", "bf16-true" or "bf16-mixed", or a Precision plugin.
        argument: the subclass's name for ``inner``, for messages.

    Raises:
        ValueError: if ``inner`` is another string.
        TypeError: if ``inner`` is neither a string nor a plugin, or is a plugin of the same class.
    """

    given_as: ClassVar[str] = "plugins=[{}]"
    kind: ClassVar[str] = "precision"
    saves: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    constraints: ClassVar[str] = ""
    survey = InSurveys()
    search_space: ClassVar[SearchSpace | None] = None

    def __init__(self, inner: str | Precision = "32-true", *, argument: str = "inner") -> None:
        who = type(self).__name__
        if isinstance(inner, str) and inner not in NAMES:
            raise ValueError(
                f"{who}({argument}={inner!r}): expected one of {', '.join(NAMES)}, or a Precision plugin, such as"
                " MixedPrecision('16-mixed', 'cuda')."
            )
        if not (isinstance(inner, str) or is_a(inner, Precision)) or isinstance(inner, type(self)):
            raise TypeError(
                f"{who}({argument} of {type(inner).__name__}): expected the name of a precision, or a plugin that is not"
                f" itself a {who}."
            )
        self._named = isinstance(inner, str)
        self.inner: Precision = NAMES[inner]() if isinstance(inner, str) else inner
        self.precision = self.inner.precision
        self._module: nn.Module | None = None
        self._seed: int | None = None
        self._passes = 0

    @property
    def scaler(self) -> Any:
        """The inner plugin's gradient scaler, or None."""
        return getattr(self.inner, "scaler", None)

    def seed(self, *key: int | str, shared: bool = False) -> int:
        """Return a number in [0, 2^63) that depends only on the run's seed, the backward passes so far, ``key`` and the rank.

        With ``shared`` it is the same on all ranks.
        """
        rank = torch.distributed.get_rank() if _is_distributed() and not shared else 0
        return rng.keyed_generator(self._agree(), type(self).__name__, rank, self._passes, *key).initial_seed()

    def _agree(self) -> int:
        """Return rank 0's seed; the first call is collective."""
        if self._seed is None:
            seed = [torch.initial_seed() % 2**63]
            if _is_distributed():
                torch.distributed.broadcast_object_list(seed)
            self._seed = seed[0]
        return self._seed

    def _place(self) -> None:
        """Set the device of a plugin built from its name to the module's device."""
        if self._named and is_a(self.inner, MixedPrecision) and self._module is not None:
            self.inner.device = next((p.device.type for p in self._module.parameters()), "cpu")

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        self._place()
        self._agree()  # collective, so not in a backward pass, during DDP's own communication
        with self.inner.train_step_context():
            yield

    def _belong_to(self, module: nn.Module) -> None:
        """Adapt the plugins to the Lightning package of ``module``; those of the other package would not clip its gradients."""
        adapt(self, module)
        adapt(self.inner, module)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._belong_to(module)
        self._module = module = self.inner.convert_module(module)
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
        self._module = None

    # -- delegated to the inner plugin

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
        self._passes += 1

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


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
