"""Feed-forward networks that compute with the first of their hidden units, while their parameters keep all of them.

A step computes the products of the narrow network. The optimizer's state is narrow too: during its step, each parameter
is narrowed. At all other times the module is the plain one. Its output weights are 0 for absent units, so it computes
what was trained.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_eff._core._architecture.linear_maps import forward_with
from lightning_eff._core._branches.ffns import FFN, Part
from lightning_eff._core._stack.partial_views import Worn, put_on, take_off, worn_by
from lightning_eff.model.growth._ffn import tiling
from lightning_eff.model.growth._ffn.products import narrow_linear


class Narrow(Worn):
    """A module that computes with some of the hidden units of its parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward`` on the narrow weights."""
        assert isinstance(self, nn.Module)
        width: Width = worn_by(self)
        return width.run(self, self._plain, args, kwargs)


def _takes_views(optimizer: Optimizer) -> bool:
    """Return whether its step updates parameters one by one in place, as torch's own do on a CPU; then nothing is copied."""
    own = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)
    return own and not any(group.get("foreach") or group.get("fused") for group in optimizer.param_groups)


class Width:
    """Sets how many of their hidden units feed-forward networks compute with.

    Args:
        root: the module.
        ffns: its feed-forward networks.
        share: the fraction of all hidden units; a whole number in each network.
    """

    def __init__(self, root: nn.Module, ffns: Sequence[FFN], share: float) -> None:
        self.ffns = list(ffns)
        self.share = share
        parameters = dict(root.named_parameters())
        self._parts: dict[int, tuple[nn.Parameter, Part, int]] = {
            id(parameters[part.name]): (parameters[part.name], part, ffn.hidden) for ffn in ffns for part in ffn.parts
        }
        self._owners: list[tuple[nn.Module, list[str]]] = []
        for m in root.modules():
            names = [name for name, p in m._parameters.items() if id(p) in self._parts]
            if names:
                self._owners.append((m, names))
        self._names = {id(m): names for m, names in self._owners}
        self._handles: list[RemovableHandle] = []
        self._narrow: list[tuple[nn.Parameter, Part, Tensor, Tensor | None]] = []
        self.made: list[Tensor] | None = None  # the narrow weights that were used, while they are recorded

    def units(self, hidden: int) -> int:
        """Return how many of ``hidden`` units are used."""
        return round(hidden * self.share)

    # -- what a step computes

    @contextmanager
    def view(self, training: bool) -> Iterator[None]:
        """Let modules compute with the units that are used, until the context ends."""
        worn = [m for m, _ in self._owners if not isinstance(m, Worn)] if self.share < 1.0 else []
        for m in worn:
            put_on(m, Narrow, cast(Any, self))
        try:
            yield
        finally:
            for m in worn:
                take_off(m)

    def run(self, m: nn.Module, plain: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``plain.forward`` of ``m`` with narrow parameters in place of its own."""
        names = self._names[id(m)]
        if (
            plain.forward is nn.Linear.forward
            and self.made is None
            and len(args) == 1
            and not kwargs
            and "weight" in names
        ):
            weight, part, hidden = self._parts[id(m.weight)]
            bias: Any = self._taken(m.bias) if "bias" in names else m.bias
            if part.groups == 1:
                return narrow_linear(args[0], weight, bias, part.dim, self.units(hidden))
        narrow = {name: self._taken(m._parameters[name]) for name in names}
        if self.made is not None:
            self.made += narrow.values()
        if plain.forward is nn.Linear.forward:
            return F.linear(*args, **kwargs, weight=narrow.get("weight", m.weight), bias=narrow.get("bias", m.bias))  # pyright: ignore[reportCallIssue, reportArgumentType]
        return forward_with(m, plain, narrow, args, kwargs)

    def _taken(self, p: Any) -> Tensor:
        _, part, hidden = self._parts[id(p)]
        return tiling.taken(p, part, self.units(hidden))

    # -- what an optimizer sees

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Let ``optimizers`` update only the used units, and keep state only for them, until :meth:`release`."""
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
            self._handles.append(optimizer.register_state_dict_post_hook(self._saved))
            self._handles.append(optimizer.register_load_state_dict_post_hook(self._loaded))

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._whole()
        if self.share >= 1.0:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._narrowed(optimizer)
            return None

        def then() -> Any:
            self._whole()  # an optimizer may call the closure several times
            loss = closure()
            with torch.no_grad():
                self._narrowed(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], then, *args[2:]), kwargs
        return args, {**kwargs, "closure": then}

    def _saved(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Give a checkpoint's state the plain module's shapes, so that a plain run can resume from it."""
        if self.share >= 1.0:
            return None
        state = dict(state_dict["state"])
        for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if id(p) in self._parts and index in state:
                _, part, hidden = self._parts[id(p)]
                state[index] = tiling.padded(state[index], part, self.units(hidden), hidden)
        return {**state_dict, "state": state}

    def _loaded(self, optimizer: Optimizer) -> None:
        for p, part, hidden in self._parts.values() if self.share < 1.0 else ():
            if p in optimizer.state:
                optimizer.state[p] = tiling.trimmed(optimizer.state[p], part, self.units(hidden), hidden)

    def _after_step(self, *_: Any) -> None:
        self._whole()

    def _narrowed(self, optimizer: Optimizer) -> None:
        in_place = _takes_views(optimizer)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if id(p) not in self._parts or p.grad is None:
                continue
            _, part, hidden = self._parts[id(p)]
            full, grad, units = p.data, p.grad, self.units(hidden)
            self._narrow.append((p, part, full, grad))
            taken = tiling.taken(full, part, units), tiling.taken(grad, part, units)
            p.grad = None
            p.data, p.grad = taken if in_place and p.device.type == "cpu" else (t.contiguous() for t in taken)

    @torch.no_grad()
    def _whole(self) -> None:
        """Make parameters whole again, with the result of the step."""
        while self._narrow:
            p, part, full, grad = self._narrow.pop()
            if p.data.data_ptr() != full.data_ptr():  # a view of the first rows has already changed the whole tensor
                tiling.put(full, part, p.data)
            p.grad = None
            p.data = full
            p.grad = grad

    # -- growth

    @torch.no_grad()
    def clear(self) -> None:
        """Zero the output weights of absent units, so that the plain module computes what is trained."""
        for p, part, hidden in self._parts.values():
            if part.last:
                tiling.clear(p.data, part, self.units(hidden))

    @torch.no_grad()
    def grow(
        self,
        share: float,
        optimizers: Sequence[Optimizer] = (),
        *,
        copy_state: bool = True,
        noise: float = 0.0,
        generator: Callable[[str], Generator] | None = None,
    ) -> None:
        """Use the fraction ``share`` of all hidden units, by repeating those that are used.

        Args:
            share: a whole multiple of the current fraction.
            optimizers: those that may hold state of the parameters.
            copy_state: whether to repeat their state too. Otherwise, and for state of another form, it starts empty.
            noise: see :func:`tiling.apart`.
            generator: a function of a parameter's name that returns the generator of its noise.
        """
        before = self.share
        for p, part, hidden in self._parts.values():
            units, times = round(hidden * before), round(hidden * share) // round(hidden * before)
            value = tiling.tiled(tiling.taken(p.data, part, units), part, times)
            if noise and generator is not None and not part.last and p.ndim > 1:
                value = tiling.apart(value, part, times, noise, generator(part.name))
            tiling.put(p.data, part, value)
            for optimizer in optimizers:
                state = optimizer.state.pop(p, None)
                if state and copy_state and (made := tiling.tiled_state(state, part, units, times)) is not None:
                    optimizer.state[p] = made
        self.share = share
        self.clear()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that have hidden units."""
        return (p for p, _, _ in self._parts.values())

    def release(self) -> None:
        """Undo everything."""
        self._whole()
        for handle in self._handles:
            handle.remove()
        self._handles = []
