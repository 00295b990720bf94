"""An optimizer's steps on the host, for parameters that stay on their device (Ren et al. 2021, arXiv:2101.06840)."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_eff._core.optimizers import PER_PARAMETER, is_per_parameter, step_in_parts

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_optimizer(optimizer: Optimizer, *, scaled: bool) -> None:
    """Check that the update of ``optimizer`` can run on the host.

    Args:
        optimizer: the optimizer from ``configure_optimizers``.
        scaled: whether a gradient scaler is in use (precision "16-mixed").

    Raises:
        ValueError: if it cannot, with the reason.
    """
    who = f"OptimizerOffload: {type(optimizer).__name__}"
    if not is_per_parameter(optimizer):
        lbfgs = isinstance(optimizer, torch.optim.LBFGS)
        reason = "evaluates its closure on the device, several times per step" if lbfgs else "is not supported"
        raise ValueError(
            f"{who} {reason}. Use one of torch.optim's own ({', '.join(PER_PARAMETER)}), or remove OptimizerOffload."
        )
    for group in optimizer.param_groups:
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                raise ValueError(f"{who} has {flag}=True, but its step runs on the host. Remove {flag}=True.")
        for name, value in group.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                raise ValueError(
                    f"{who} has a tensor on {value.device} as {name}, but its step runs on the host. Pass {name} as a float."
                )
        for p in group["params"]:
            if p.requires_grad and (type(p) not in (nn.Parameter, Tensor) or p.device.type == "meta"):
                raise ValueError(
                    f"{who} holds a {type(p).__name__} on {p.device}, but only plain parameters are supported. Use the"
                    " strategy's own offloading for sharded models."
                )
    if scaled and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            f"{who} has fused=True under a gradient scaler, which it applies on the device. Remove fused=True."
        )


def _checksum(p: Tensor) -> Tensor:
    """Sum the bits of ``p`` as integers, to detect changes that bypass autograd's version, as by ``.data``."""
    p = torch.view_as_real(p) if p.is_complex() else p
    return p.view(_BITS[p.element_size()]).sum()


class _Twin:
    """A parameter and its copy in host memory.

    Attributes:
        parameter: the parameter on the device.
        host: its copy, without elements until the first gradient comes.
        mark: the version, address and checksum of the parameter when it was last copied.
    """

    __slots__ = ("_gradient", "host", "mark", "parameter")

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.host = nn.Parameter(torch.empty(0, dtype=parameter.dtype))
        self.mark: tuple[int, int, Tensor] | None = None
        self._gradient: Tensor | None = None

    def send_gradient(self, *, pinned: bool) -> int:
        """Start copying the gradient to the host, and return its bytes."""
        gradient = self.parameter.grad
        if gradient is None:
            self.host.grad = None
            return 0
        if self.host.shape != self.parameter.shape:
            self.host.data = _on_host(self.parameter, pinned=pinned)
        if gradient.is_sparse:
            self.host.grad = gradient.to("cpu")
            return gradient._values().numel() * gradient.element_size()
        if self._gradient is None:
            self._gradient = _on_host(gradient, pinned=pinned)
        self._gradient.copy_(gradient, non_blocking=pinned)
        self.host.grad = self._gradient
        return gradient.numel() * gradient.element_size()

    def send(self, *, pinned: bool) -> int:
        """Start copying the parameter to the host, and return its bytes."""
        self.host.data.copy_(self.parameter, non_blocking=pinned)
        return self.parameter.numel() * self.parameter.element_size()

    def fetch(self, *, pinned: bool) -> int:
        """Start copying the host's values into the parameter, and return its bytes."""
        p = self.parameter
        p.copy_(self.host, non_blocking=pinned)
        self.mark = (p._version, p.data_ptr(), _checksum(p))
        return p.numel() * p.element_size()


def _on_host(like: Tensor, *, pinned: bool) -> Tensor:
    return torch.empty_like(like.detach(), device="cpu", pin_memory=pinned)


class HostUpdate:
    """Run the steps of an optimizer on the host, for parameters that stay on their device.

    The optimizer stays the same object. Between steps, its groups hold the module's parameters, and its state maps them to
    tensors in host memory. During a step, and during ``load_state_dict``, both use the parameters' copies in host memory. A
    parameter that other code changed is copied again. Changes are detected by autograd's version, the address, and the sum of
    its bits for changes through ``.data``.

    Attributes:
        bytes_to_host: the bytes copied to the host in the last step.
        bytes_to_device: the bytes copied back in it.
        seconds: its duration, with copies but without the closure.

    Args:
        optimizer: an optimizer that :func:`check_optimizer` accepts.
        pin_memory: whether to pin the host memory of copies and gradients of CUDA parameters.
    """

    def __init__(self, optimizer: Optimizer, *, pin_memory: bool) -> None:
        self.optimizer = optimizer
        self.pin_memory = pin_memory
        self.bytes_to_host = self.bytes_to_device = 0
        self.seconds = 0.0
        self._step, self._load = optimizer.step, optimizer.load_state_dict
        self._twins: dict[Any, _Twin] = {}  # by parameter
        with self._swapped():
            pass  # move states that exist already to the host

    @property
    def state_bytes(self) -> int:
        """The bytes of the optimizer's states."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.numel() * value.element_size() for value in states if isinstance(value, Tensor))

    @property
    def on_accelerator(self) -> bool:
        """Whether any parameter is not in host memory."""
        return any(p.device.type != "cpu" for p in self._twins)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run ``optimizer.step``; its hooks and the closure see the module's parameters."""
        return step_in_parts(self.optimizer, closure, kwargs, self._update)

    def _update(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        began = time.perf_counter()
        twins = self._send()
        with self._swapped(), self._fused():
            self._step(*args, **keywords)
        with torch.no_grad():
            self.bytes_to_device = sum(twin.fetch(pinned=self._pinned(twin.parameter)) for twin in twins)
        self.seconds = time.perf_counter() - began

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Run ``optimizer.load_state_dict``, with the states in host memory."""
        with self._swapped():
            self._load(state_dict)

    def _pinned(self, p: Tensor) -> bool:
        return self.pin_memory and p.device.type == "cuda"

    def _twin(self, p: Tensor) -> _Twin:
        if p not in self._twins:
            self._twins[p] = _Twin(p)
        return self._twins[p]

    @torch.no_grad()
    def _send(self) -> list[_Twin]:
        """Copy each gradient, and each changed parameter, to the host; return the twins with a gradient."""
        every = [self._twin(p) for group in self.optimizer.param_groups for p in group["params"]]
        self.bytes_to_host = sum(twin.send_gradient(pinned=self._pinned(twin.parameter)) for twin in every)
        twins = [twin for twin in every if twin.host.grad is not None]
        known = [twin for twin in twins if twin.mark is not None]
        now = [(twin.parameter._version, twin.parameter.data_ptr()) for twin in known]
        sums = _values([_checksum(twin.parameter) for twin in known])
        marks = [twin.mark for twin in known if twin.mark is not None]
        then = [(*mark[:2], value) for mark, value in zip(marks, _values([mark[2] for mark in marks]), strict=True)]
        same = {
            id(twin) for twin, place, value, mark in zip(known, now, sums, then, strict=True) if (*place, value) == mark
        }
        for twin in twins:
            if id(twin) not in same:
                self.bytes_to_host += twin.send(pinned=self._pinned(twin.parameter))
        for device in {twin.parameter.device for twin in twins if twin.parameter.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return twins

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Let the optimizer's groups and states use the twins."""
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            group["params"] = [self._twin(p).host for p in group["params"]]
        states, optimizer.state = optimizer.state, defaultdict(dict)
        optimizer.state.update({self._twin(p).host: _to_host(state) for p, state in states.items()})
        back: dict[Any, Any] = {twin.host: p for p, twin in self._twins.items()}
        try:
            yield
        finally:
            states.clear()
            states.update({back[host]: state for host, state in optimizer.state.items()})
            optimizer.state = states
            for group in optimizer.param_groups:
                group["params"] = [back[host] for host in group["params"]]

    @contextmanager
    def _fused(self) -> Iterator[None]:
        """Use torch's fused CPU step, where there is one, for groups with parameters on an accelerator."""
        chosen = []
        if self.on_accelerator:
            chosen = [
                group
                for group in self.optimizer.param_groups
                if group.get("fused", False) is None
                and group.get("foreach") is None
                and all(p.is_floating_point() for p in group["params"])
            ]
        for group in chosen:
            group["fused"] = True
        try:
            yield
        finally:
            for group in chosen:
                group["fused"] = None


def _to_host(state: dict[str, Any]) -> dict[str, Any]:
    """Move the tensors of a dict to host memory, and return the dict."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.device.type != "cpu":
            state[key] = value.to("cpu")
    return state


def _values(numbers: list[Tensor]) -> list[int]:
    """Return the values of scalar tensors, with one wait per device."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for i, number in enumerate(numbers):
        by_device[number.device].append(i)
    found = [0] * len(numbers)
    for where in by_device.values():
        for i, value in zip(where, torch.stack([numbers[i] for i in where]).tolist(), strict=True):
            found[i] = value
    return found
