"""Weights and optimizer states in bfloat16 without a float32 copy, by stochastically rounded updates.

Gupta et al. 2015, arXiv:1502.02551; with Adam, for large language models: Ozkara et al. 2025, PMLR 258:4402-4410.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

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

from lightning_eff._core.optimizers import PER_PARAMETER, is_per_parameter, step_in_parts
from lightning_eff._core.search_space import SearchSpace, Survey, needs_memory_bound
from lightning_eff._core.wrapping import WrappingPrecision
from lightning_eff.kernels.bf16_adamw import adamw_
from lightning_eff.kernels.stochastic_rounding import stochastic_round
from lightning_eff.precision._rounding.advice import is_mixed, mixed, step_of, to_be_cast, without_bfloat16

_MIXING = (_WeightedLoss, _SpectralNorm)  # whose buffers are computed with activations or weights
CHUNK = 2**24  # weights that are in float32 at a time
_SEEDS = 2**61


class StochasticRoundingBF16(WrappingPrecision):
    """Train wholly in bfloat16: forward, backward, weights and optimizer states, with updates that are not lost.

    ``Trainer(plugins=[StochasticRoundingBF16()])``. As with ``precision="bf16-true"`` the module's parameters and inputs
    are bfloat16; that alone loses every update below 2^-9 of a weight, as it is rounded to nearest. Here the user's own
    optimizer makes its step in float32 on a part of the weights at a time, and the new weights and states are rounded
    stochastically: up with the probability that makes them right on average. Nothing is kept in float32, so that with
    AdamW a weight takes 6 bytes and its gradient 2, where float32 training, and bf16-mixed, take 16.

    Buffers stay as they are: running statistics, rotary frequencies and the like keep their float32, and so do weight and
    bias of the norms that have running statistics, which torch computes with them. Of torch's own modules those are cast
    whose buffers enter products with what is bfloat16: class weights of losses, the vectors of spectral norm. Others that
    need it (position tables that are added to activations, float masks) are named by ``cast_buffers``. Where one is missing,
    the first step's error names it, after running that step again with it cast.

    Checkpoints hold what is trained: bfloat16 weights and states, and buffers as they are. They load strictly into the
    plain module, which turns them into its own dtype without a change. After the run the module's own parameters have the
    dtype that they had before, and the values that they were trained to.

    States of a parameter's own shape are bfloat16; smaller ones (step counts, Adafactor's rows and columns) stay as the
    optimizer made them. AdamW has a kernel of its own, which also keeps the float32 values out of memory. Ranks round
    alike, so that their weights stay equal, and a resumed run rounds as the undisturbed one.

    Args:
        cast_buffers: buffers that are cast too while the module runs, by dotted path or its last part.

    Raises:
        TypeError: if ``cast_buffers`` is a string.
        ValueError: at setup, if ``cast_buffers`` names no buffer of floating-point numbers, or an optimizer is not one of
            torch.optim's own that treat each parameter by itself, is capturable, differentiable or fused, or holds
            parameters that are sharded.
        RuntimeError: in the first step, if a buffer that stays meets what is bfloat16 in an operation that takes one dtype, or
            the step does with a bfloat16 tensor what torch or NumPy cannot.
    """

    saves: ClassVar[str] = "8 of the 16 bytes a weight that weights, gradients and AdamW's states take"
    paper: ClassVar[str] = "Gupta et al. 2015, arXiv:1502.02551"
    constraints: ClassVar[str] = "torch.optim's own optimizers but LBFGS and SparseAdam; noise of one rounding a step"
    survey: ClassVar[Survey | None] = Survey("low-precision weights and states", zhuang="3", shen="4.2.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(pointless=needs_memory_bound)

    def __init__(self, *, cast_buffers: Collection[str] = ()) -> None:
        super().__init__("bf16-true")
        if isinstance(cast_buffers, str):
            raise TypeError(
                f"StochasticRoundingBF16(cast_buffers={cast_buffers!r}): expected a tuple of names, such as"
                f" ({cast_buffers!r},)."
            )
        self.cast_buffers = tuple(cast_buffers)
        self._updates = 0
        self._parameters: list[tuple[nn.Parameter, torch.dtype]] = []
        self._cast: list[tuple[nn.Module, str, Tensor]] = []
        self._kept: list[str] = []  # buffers that stay

    # -- what is cast

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._put_back()
        self._belong_to(module)
        self._module = module
        named = [(path, *found) for path, found in _buffers(module).items()]
        for name in self.cast_buffers:
            if not any(_is_named(path, name) for path, _, _ in named):
                raise ValueError(
                    f"StochasticRoundingBF16(cast_buffers={self.cast_buffers}): {name!r} names no buffer of floating-point"
                    f" numbers; expected some of {', '.join(path for path, _, _ in named) or 'none, since there is none'}."
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
            assert buffer is not None, "a buffer of floating-point numbers"
            self._cast.append((owner, name, buffer))
            owner._buffers[name] = buffer.to(torch.bfloat16)
        rank_zero_info(self._told())
        return module

    def _told(self) -> str:
        told = "StochasticRoundingBF16: weights and optimizer states are bfloat16, in checkpoints too"
        if self._kept:
            more = f" and {len(self._kept) - 4} more" if len(self._kept) > 4 else ""
            told += f"; as they are: buffers ({', '.join(self._kept[:4])}{more}), and weights of norms with running statistics"
        return f"{told}. After the run the module's parameters have their own dtype again."

    def _put_back(self) -> None:
        """Let the module have its dtypes again."""
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
        return nullcontext()  # what is made in bfloat16 would have its buffers rounded

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
        """An error of mixed dtypes says which buffers to cast, after trying that; one of missing bfloat16 says where."""
        try:
            yield
        except (RuntimeError, TypeError) as error:
            who, module = f"StochasticRoundingBF16(cast_buffers={self.cast_buffers})", self._module
            told = without_bfloat16(error, who)
            step = None if told is not None else step_of(error.__traceback__)
            if step is not None and self._kept and module is not None and is_mixed(error):
                kept = {
                    path: (owner, name)  # statistics belong to norms whose weights stay float32, too
                    for path, (owner, name) in _buffers(module).items()
                    if path in self._kept and not _has_statistics(owner)
                }
                told = mixed(error, who, self.cast_buffers, to_be_cast(step, module, kept))
            if told is None:
                raise
            raise RuntimeError(told) from error

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
    """The module's buffers of floating-point numbers: by path, whose they are and what they are called there."""
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
    """Whether torch computes with the module's parameters and its buffers in one operation, which takes one dtype."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def _turn(p: nn.Parameter, dtype: torch.dtype) -> None:
    """Let a parameter, and its gradient, be of another dtype."""
    grad, p.grad = p.grad, None
    p.data = p.data.to(dtype)
    p.grad = None if grad is None else grad.to(dtype)


def _check(optimizer: Optimizer) -> None:
    who = f"StochasticRoundingBF16: {type(optimizer).__name__}"
    if not is_per_parameter(optimizer, but=("SparseAdam",)):
        expected = ", ".join(name for name in PER_PARAMETER if name != "SparseAdam")
        raise ValueError(
            f"{who} is not known to treat each parameter by itself; expected one of torch.optim's own: {expected}. Use one"
            " of them, or precision='bf16-mixed'."
        )
    for group in optimizer.param_groups:
        for flag in ("capturable", "differentiable", "fused"):
            if group.get(flag):
                raise ValueError(
                    f"{who} has {flag}=True; expected False, because the step is made on float32 copies of a part of the"
                    f" weights at a time. Leave {flag} out."
                )
        for p in group["params"]:
            if type(p) not in (nn.Parameter, Tensor):
                raise ValueError(
                    f"{who} holds a {type(p).__name__}; expected plain parameters, because all ranks round alike. Use a"
                    " single device or strategy='ddp'."
                )


def _update(optimizer: Optimizer, seed: int, keywords: dict[str, Any]) -> None:
    """Step every parameter that has a gradient; the ``i``-th draws from numbers of its own."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue] -- what schedulers look at
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
    assert grad is not None, "only parameters with a gradient come here"
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
    """Runs of parameters of at most ``CHUNK`` weights, or of one parameter."""
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
    """The optimizer's own step on float32 copies of these parameters, their gradients and states; then back."""
    twins: list[nn.Parameter] = []
    for p, _ in chunk:
        assert p.grad is not None, "only parameters with a gradient come here"
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
    """Let the optimizer hold the twins alone, with the states of the parameters in float32."""
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
    """Whether a state is one number for each weight of ``p``."""
    return isinstance(value, Tensor) and value.shape == p.shape and value.ndim > 0 and value.is_floating_point()
