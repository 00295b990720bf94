"""Weights and optimizer states in bfloat16 without a float32 copy, with stochastically rounded updates.

Gupta et al. 2015, arXiv:1502.02551; with Adam, for large language models: Ozkara et al. 2025, PMLR 258:4402-4410.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _WeightedLoss
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Names
from lightning_eff._core.optimizers import PER_PARAMETER, is_per_parameter, step_in_parts
from lightning_eff._core.search_space import SearchSpace, needs_memory_bound
from lightning_eff._core.wrapping import WrappingPrecision
from lightning_eff.kernels.bf16_adamw import adamw_
from lightning_eff.kernels.stochastic_rounding import stochastic_round
from lightning_eff.precision._rounding.advice import is_mixed, mixed, step_of, to_be_cast, without_bfloat16

_MIXING = (_WeightedLoss, _SpectralNorm)  # their buffers are combined with activations or weights
CHUNK = 2**24  # the number of weights in float32 at a time
_SEEDS = 2**61
CastBuffers = Annotated[Collection[str], Names("buffers", hint="Write a tuple, such as cast_buffers=('mask',).")]


class StochasticRoundingBF16(WrappingPrecision):
    """Train entirely in bfloat16, with stochastic rounding that does not lose small updates.

    As with ``precision="bf16-true"``, the module's parameters and inputs are bfloat16. Rounding to nearest would lose every
    update below 2^-9 of a weight. Here the module's own optimizer steps in float32 on a part of the weights at a time, and the
    new weights and states are rounded up or down at random, with probabilities that make them correct on average.

    Use it when weights, gradients and optimizer states do not fit into memory. Nothing is stored in float32: with AdamW, a
    weight needs 6 bytes and its gradient 2, compared with 16 for float32 and bf16-mixed training. The cost is the noise of
    one rounding per step.

    Buffers keep their dtype, such as running statistics and rotary frequencies. The weight and bias of norms with running
    statistics stay float32 too, because torch computes with both in one operation. The plugin casts the buffers of torch's own
    modules that are multiplied with bfloat16 values: class weights of losses and the vectors of spectral norm. Name others
    that need it, such as added position tables and float masks, in ``cast_buffers``. If one is missing, the first step is
    repeated with buffers cast, and the error names the ones to add.

    Checkpoints hold bfloat16 weights and states, and buffers in their own dtype. They load strictly into the plain module.
    After the run, the module's parameters have their earlier dtype and the trained values.

    States with the shape of their parameter are bfloat16. Smaller ones (step counts, Adafactor's rows and columns) keep the
    optimizer's dtype. AdamW has its own kernel, which avoids the float32 copies. All ranks round alike, so their weights stay
    equal, and a resumed run rounds like an uninterrupted one.

    Args:
        cast_buffers: the buffers to cast to bfloat16 as well, by dotted path or by its last part.

    Raises:
        ValueError: if ``cast_buffers`` is a string. At setup, if ``cast_buffers`` names no floating-point buffer, or an
            optimizer is not one of torch.optim's own that treat each parameter separately, is capturable, differentiable or
            fused, or holds sharded parameters.
        RuntimeError: in the first step, if an operation mixes a float32 buffer with bfloat16 values, or if the step passes a
            bfloat16 tensor to something that does not support it.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, plugins=[StochasticRoundingBF16()])

    References:
        Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", arXiv:1502.02551.
        Ozkara et al. 2025, "Stochastic Rounding for LLM Training: Theory and Practice", PMLR 258:4402-4410.
    """

    saves: ClassVar[str] = "8 of the 16 bytes per weight that weights, gradients and AdamW's states need"
    paper: ClassVar[str] = "Gupta et al. 2015, arXiv:1502.02551"
    constraints: ClassVar[str] = (
        "needs an optimizer of torch.optim, not LBFGS or SparseAdam; one rounding error per step"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace(pointless=needs_memory_bound)

    @declared
    def __init__(self, *, cast_buffers: CastBuffers = ()) -> None:
        super().__init__("bf16-true")
        self.cast_buffers = tuple(cast_buffers)
        self._updates = 0
        self._parameters: list[tuple[nn.Parameter, torch.dtype]] = []
        self._cast: list[tuple[nn.Module, str, Tensor]] = []
        self._kept: list[str] = []  # buffers that stay unchanged

    # -- casts

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._put_back()
        self._belong_to(module)
        self._module = module
        named = [(path, *found) for path, found in _buffers(module).items()]
        for name in self.cast_buffers:
            if not any(_is_named(path, name) for path, _, _ in named):
                raise ValueError(
                    f"StochasticRoundingBF16(cast_buffers={self.cast_buffers}): {name!r} names no floating-point"
                    f" buffer. Use names from {[path for path, _, _ in named][:5]}, or remove it."
                )
        exact = {id(p) for m in module.modules() if _has_statistics(m) for p in m.parameters(recurse=False)}
        for p in module.parameters():
            if p.is_floating_point() and id(p) not in exact and p.dtype != torch.bfloat16:
                self._parameters.append((p, p.dtype))
                _turn(p, torch.bfloat16)
        self._kept = []
        for path, owner, name in named:
            if not isinstance(owner, _MIXING) and not any(_is_named(path, n) for n in self.cast_buffers):
                self._kept.append(path)
                continue
            buffer = owner._buffers[name]
            assert buffer is not None, "a floating-point buffer"
            self._cast.append((owner, name, buffer))
            owner._buffers[name] = buffer.to(torch.bfloat16)
        rank_zero_info(self._message())
        return module

    def _message(self) -> str:
        text = "StochasticRoundingBF16: weights and optimizer states are bfloat16, also in checkpoints"
        if self._kept:
            more = f" and {len(self._kept) - 4} more" if len(self._kept) > 4 else ""
            text += (
                f"; unchanged: buffers ({', '.join(self._kept[:4])}{more}) and weights of norms with running statistics"
            )
        return f"{text}. After the run, parameters have their own dtype again."

    def _put_back(self) -> None:
        """Restore the module's dtypes."""
        while self._parameters:
            _turn(*self._parameters.pop())
        while self._cast:
            owner, name, had = self._cast.pop()
            now = owner._buffers.get(name)
            if now is not None:
                same = now.shape == had.shape and torch.equal(now, had.to(now.device, now.dtype))
                owner._buffers[name] = (had if same else now).to(now.device, had.dtype)

    @override
    def teardown(self) -> None:
        self._put_back()
        super().teardown()

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()  # a module created in bfloat16 would have rounded buffers

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        with self._explained(), super().train_step_context():
            yield

    @override
    @contextmanager
    def val_step_context(self) -> Generator[None, None, None]:
        with self._explained(), super().val_step_context():
            yield

    @override
    @contextmanager
    def test_step_context(self) -> Generator[None, None, None]:
        with self._explained(), super().test_step_context():
            yield

    @override
    @contextmanager
    def predict_step_context(self) -> Generator[None, None, None]:
        with self._explained(), super().predict_step_context():
            yield

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Explain errors: name the buffers to cast if dtypes are mixed, or the line that does not support bfloat16."""
        try:
            yield
        except (RuntimeError, TypeError) as error:
            who, module = f"StochasticRoundingBF16(cast_buffers={self.cast_buffers})", self._module
            message = without_bfloat16(error, who)
            step = None if message is not None else step_of(error.__traceback__)
            if step is not None and self._kept and module is not None and is_mixed(error):
                kept = {
                    path: (owner, name)  # norms with statistics stay float32
                    for path, (owner, name) in _buffers(module).items()
                    if path in self._kept and not _has_statistics(owner)
                }
                message = mixed(error, who, self.cast_buffers, to_be_cast(step, module, kept))
            if message is None:
                raise
            raise RuntimeError(message) from error

    # -- the update

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        for optimizer in optimizers:
            _check(optimizer)
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        self._updates += 1
        seed = self.seed("update", self._updates, shared=True)

        def wrapped() -> Any:
            return self._wrap_closure(model, optimizer, closure)

        def update(args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            with torch.no_grad():
                _update(optimizer, seed, keywords)

        return step_in_parts(optimizer, wrapped, kwargs, update)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self._updates}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._updates = state_dict["updates"]


def _buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the floating-point buffers by path: the module that holds each, and its name there."""
    return {
        f"{path}.{name}".lstrip("."): (owner, name)
        for path, owner in module.named_modules()
        if not isinstance(owner, Metric)
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    }


def _is_named(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _has_statistics(module: nn.Module) -> bool:
    """Return whether torch combines the module's parameters and buffers in one operation, which needs one dtype."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def _turn(p: nn.Parameter, dtype: torch.dtype) -> None:
    """Change the dtype of a parameter and its gradient."""
    grad, p.grad = p.grad, None
    p.data = p.data.to(dtype)
    p.grad = None if grad is None else grad.to(dtype)


def _check(optimizer: Optimizer) -> None:
    who = f"StochasticRoundingBF16: the optimizer {type(optimizer).__name__}"
    if not is_per_parameter(optimizer, but=("SparseAdam",)):
        expected = ", ".join(name for name in PER_PARAMETER if name != "SparseAdam")
        raise ValueError(
            f"{who} is not known to treat each parameter separately. Use precision='bf16-mixed', or one of torch.optim's"
            f" own: {expected}."
        )
    for group in optimizer.param_groups:
        for flag in ("capturable", "differentiable", "fused"):
            if group.get(flag):
                raise ValueError(
                    f"{who} has {flag}=True, but it steps on float32 copies of a part of the weights at a time. Remove"
                    f" {flag}=True."
                )
        for p in group["params"]:
            if type(p) not in (nn.Parameter, Tensor):
                raise ValueError(
                    f"{who} holds a {type(p).__name__}, but sharded parameters are not supported. Use a single device or"
                    " strategy='ddp'."
                )


def _update(optimizer: Optimizer, seed: int, keywords: dict[str, Any]) -> None:
    """Step every parameter that has a gradient, with its own random numbers."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue] -- schedulers check it
    number = 0
    for group in optimizer.param_groups:
        numbered = []
        for p in group["params"]:
            number += 1
            if p.grad is not None:
                numbered.append((p, number))
        if _is_plain_adamw(optimizer, group):
            rest = [pair for pair in numbered if not _fits_kernel(pair[0])]
            for p, i in numbered:
                if _fits_kernel(p):
                    _adamw(optimizer, group, p, (seed + i * 2**40) % _SEEDS)
        else:
            rest = numbered
        for chunk in _chunks(rest):
            _step_chunk(optimizer, group, chunk, seed, keywords)


def _is_plain_adamw(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    adam = type(optimizer) is torch.optim.Adam and not group["weight_decay"]
    plain = not group.get("amsgrad") and not group.get("maximize")
    return (type(optimizer) is torch.optim.AdamW or adam) and plain


def _fits_kernel(p: Tensor) -> bool:
    return p.dtype == torch.bfloat16 and p.is_contiguous() and p.grad is not None and not p.grad.is_sparse


def _adamw(optimizer: Optimizer, group: dict[str, Any], p: Tensor, seed: int) -> None:
    state, grad = optimizer.state[p], p.grad
    assert grad is not None, "the caller passes only parameters with a gradient"
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"], state["exp_avg_sq"] = (
            torch.zeros_like(p, memory_format=torch.contiguous_format) for _ in range(2)
        )
    state["step"] += 1
    b1, b2 = (float(beta) for beta in group["betas"])
    adamw_(
        p,
        grad,
        state["exp_avg"],
        state["exp_avg_sq"],
        lr=float(group["lr"]),
        betas=(b1, b2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=int(state["step"]),
        seed=seed,
    )


def _chunks(numbered: list[tuple[Tensor, int]]) -> Iterator[list[tuple[Tensor, int]]]:
    """Yield groups of parameters with at most ``CHUNK`` weights, or with one parameter."""
    chunk: list[tuple[Tensor, int]] = []
    size = 0
    for p, i in numbered:
        if chunk and size + p.numel() > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append((p, i))
        size += p.numel()
    if chunk:
        yield chunk


def _step_chunk(
    optimizer: Optimizer,
    group: dict[str, Any],
    chunk: list[tuple[Tensor, int]],
    seed: int,
    keywords: dict[str, Any],
) -> None:
    """Run the optimizer's step on float32 copies of these parameters, gradients and states, then copy back."""
    twins: list[nn.Parameter] = []
    for p, _ in chunk:
        assert p.grad is not None, "the caller passes only parameters with a gradient"
        twin = nn.Parameter(p.detach().to(torch.float32, copy=True))
        twin.grad = p.grad.float()
        twins.append(twin)
    with _holding(optimizer, group, twins, [p for p, _ in chunk]):
        optimizer.step(**keywords)
    for (p, i), twin in zip(chunk, twins, strict=True):
        at = (seed + i * 2**40) % _SEEDS
        if p.dtype == torch.bfloat16:
            p.copy_(stochastic_round(twin.detach(), seed=3 * at))
        else:
            p.copy_(twin)
        state = optimizer.state.get(p, {})
        for n, (key, value) in enumerate(state.items(), start=1):
            if p.dtype == torch.bfloat16 and _is_large(value, p) and value.dtype == torch.float32:
                state[key] = stochastic_round(value, seed=(3 * at + n) % 2**63)


@contextmanager
def _holding(
    optimizer: Optimizer, group: dict[str, Any], twins: list[nn.Parameter], parameters: list[Tensor]
) -> Iterator[None]:
    """Let the optimizer hold only the twins, with the states of the parameters in float32."""
    groups, states, held = optimizer.param_groups, optimizer.state, group["params"]
    optimizer.param_groups, group["params"] = [group], twins
    optimizer.state = defaultdict(dict)
    for p, twin in zip(parameters, twins, strict=True):
        if p in states:
            optimizer.state[twin] = {k: v.float() if _is_large(v, p) else v for k, v in states[p].items()}
    try:
        yield
    finally:
        for p, twin in zip(parameters, twins, strict=True):
            if optimizer.state.get(twin):
                states[p] = optimizer.state[twin]
        optimizer.param_groups, optimizer.state, group["params"] = groups, states, held


def _is_large(value: Any, p: Tensor) -> bool:
    """Return whether a state has one number per weight of ``p``."""
    return isinstance(value, Tensor) and value.shape == p.shape and value.ndim > 0 and value.is_floating_point()
