"""Weights and optimizer states in bfloat16 without a float32 copy, by stochastically rounded updates.

Gupta et al. 2015, arXiv:1502.02551; with Adam, for large language models: Ozkara et al. 2025, PMLR 258:4402-4410.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core.optimizers import PER_PARAMETER, is_per_parameter, step_in_parts
from lightning_eff._core.search_space import SearchSpace, Survey, needs_memory_bound
from lightning_eff._core.wrapping import WrappingPrecision
from lightning_eff.kernels.bf16_adamw import adamw_
from lightning_eff.kernels.stochastic_rounding import stochastic_round

CHUNK = 2**24  # weights that are in float32 at a time
_SEEDS = 2**61


class StochasticRoundingBF16(WrappingPrecision):
    """Train wholly in bfloat16: forward, backward, weights and optimizer states, with updates that are not lost.

    ``Trainer(plugins=[StochasticRoundingBF16()])``. As with ``precision="bf16-true"`` the module's parameters and inputs
    are bfloat16; that alone loses every update below 2^-9 of a weight, as it is rounded to nearest. Here the user's own
    optimizer makes its step in float32 on a part of the weights at a time, and the new weights and states are rounded
    stochastically: up with the probability that makes them right on average. Nothing is kept in float32, so that with
    AdamW a weight takes 6 bytes and its gradient 2, where float32 training, and bf16-mixed, take 16.

    States of a parameter's own shape are bfloat16; smaller ones (step counts, Adafactor's rows and columns) stay as the
    optimizer made them. AdamW has a kernel of its own, which also keeps the float32 values out of memory. Ranks round
    alike, so that their weights stay equal, and a resumed run rounds as the undisturbed one.

    Raises:
        ValueError: at setup, if an optimizer is not one of torch.optim's own that treat each parameter by itself, is
            capturable, differentiable or fused, or holds parameters that are sharded.
    """

    saves: ClassVar[str] = "8 of the 16 bytes a weight that weights, gradients and AdamW's states take"
    paper: ClassVar[str] = "Gupta et al. 2015, arXiv:1502.02551"
    constraints: ClassVar[str] = "torch.optim's own optimizers but LBFGS and SparseAdam; noise of one rounding a step"
    survey: ClassVar[Survey | None] = Survey("low-precision weights and states", zhuang="3", shen="4.2.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(pointless=needs_memory_bound)

    def __init__(self) -> None:
        super().__init__("bf16-true")
        self._updates = 0

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
            if _is_large(value, p) and value.dtype == torch.float32:
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
