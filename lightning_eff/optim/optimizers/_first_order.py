"""Shared by first-order update rules: the types of their arguments, and a step over lists of tensors."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Each, Fraction, Number
from lightning_eff.optim.optimizers import _lists as lists

Rate = Annotated[float, Number(at_least=0)]  #: a learning rate, a weight decay, or another factor
Eps = Annotated[float, Number(at_least=0)]
Betas = Annotated[tuple[float, float], Each(Fraction(below=1), length=2)]


def keep_dtypes(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Restore the dtypes of a state after loading, because torch casts it to the parameters' dtypes.

    Args:
        optimizer: the optimizer that loaded the state.
        state_dict: the state that it loaded.
    """
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in zip(ids, params, strict=True):
        for name, value in state_dict["state"].get(i, {}).items():
            if isinstance(value, Tensor) and optimizer.state[p][name].dtype != value.dtype:
                optimizer.state[p][name] = value.to(p.device, copy=True)


class FirstOrder(Optimizer):
    """An update rule that moves each parameter by its gradient and its own state; a subclass implements :meth:`update`."""

    @abstractmethod
    def begin(self, p: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first step."""

    @abstractmethod
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        """Update ``params`` and ``states`` in place; ``grads`` must not be changed."""

    def prepare(self) -> None:
        """Do what is due before the groups are updated."""

    def conclude(self) -> None:
        """Do what is due after all groups are updated."""

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all groups once.

        Args:
            closure: a function that computes the loss again, with gradients, and returns it.

        Raises:
            ValueError: for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.prepare()
            for group in self.param_groups:
                params, grads = [], []
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    if p.grad.is_sparse:
                        raise ValueError(
                            f"{type(self).__name__}: the gradient of a parameter of shape {tuple(p.shape)} is sparse. Set"
                            " sparse=False"
                            " in its embedding, or leave it to another optimizer."
                        )
                    params.append(p)
                    grads.append(p.grad)
                    if not self.state[p]:
                        self.state[p] = self.begin(p)
                if params:
                    self.update(group, params, grads, [self.state[p] for p in params])
            self.conclude()
        return loss


def held(states: list[dict[str, Any]], name: str) -> list[Any]:
    """Return the entry ``name`` of every state."""
    return [state[name] for state in states]


def count(states: list[dict[str, Any]]) -> list[int]:
    """Advance and return the step number of every parameter, from 1 on."""
    for state in states:
        state["step"] += 1
    return held(states, "step")


def by_step(states: list[dict[str, Any]]) -> Iterator[tuple[int, list[int] | slice]]:
    """Advance the step number of every parameter. Yield each number, from 1 on, with the places that have it."""
    steps = count(states)
    if len(set(steps)) == 1:
        yield steps[0], slice(None)
        return
    for t in sorted(set(steps)):
        yield t, [i for i, step in enumerate(steps) if step == t]


def picked(tensors: list[Tensor], places: list[int] | slice) -> list[Tensor]:
    """Return the tensors at some places from :func:`by_step`."""
    return tensors[places] if isinstance(places, slice) else [tensors[i] for i in places]


def norms(pieces: Sequence[list[Tensor]]) -> Tensor:
    """Return the norms of the tensors in one chunk, or the norm of one tensor that is sliced into several; shape (n,).

    The norm of a DTensor is that of the whole tensor.
    """
    found = [n.full_tensor() if isinstance(n, DTensor) else n for piece in pieces for n in lists.norm(piece)]
    stacked = torch.stack(found)
    return torch.linalg.vector_norm(stacked)[None] if len(pieces) > 1 else stacked
