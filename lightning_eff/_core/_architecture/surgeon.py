"""The operations of a technique on an architecture: replace submodules, freeze or share parameters, all or nothing."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from lightning_eff._core import rng
from lightning_eff._core._architecture.derived import has_hooks
from lightning_eff._core._architecture.record import FROZEN, SHARED, SWAP, Swap, tensors_of
from lightning_eff._core._architecture.stand_ins import keep_class
from lightning_eff._core._stack.walking import modules_by_path, parameters_of
from lightning_eff._core.surgery import Surgery


class Surgeon:
    """One technique's changes to one module.

    Random numbers drawn while a replacement is built depend only on the run's seed, the technique and the path, and leave the
    global stream unchanged. So the same seed gives the same parameters in a Trainer and through ``lightning_eff.apply``.

    Args:
        root: the module tree.
        seed: the run's seed.
        who: the technique's class, for messages.
        stays: why its replacements cannot be folded; empty if each replacement has ``fold``.
        batch: see the attribute.

    Attributes:
        root: the module tree.
        where: the paths of replaced submodules and of frozen parameters so far.
        batch: a batch of the module's data, for techniques that must run the module; or None.
    """

    def __init__(self, root: nn.Module, *, seed: int, who: str, stays: str = "", batch: Any = None) -> None:
        self.root = root
        self.batch = batch
        self.where: list[str] = []
        self._seed, self._who, self._stays = seed, who, stays
        self._surgery = Surgery(same_tensors=False)
        self._required = [(p, p.requires_grad) for p in parameters_of(root)]
        self._marked: list[tuple[nn.Module, list[str] | None]] = []
        self._shared: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._handles: list[RemovableHandle] = []

    def swap(
        self,
        match: Callable[[str, nn.Module], bool],
        build: Callable[[nn.Module], nn.Module],
        *,
        what: str,
        unties: bool = False,
        numbers: bool = False,
    ) -> list[str]:
        """Replace each submodule for which ``match(path, submodule)`` returns True by ``build(submodule)``.

        Tensors that ``build`` creates have by default the device and dtype of the submodule's parameters. The replacement may
        register the originals under their own names or others, and freeze them. A replacement of a linear layer or a
        convolution stays an instance of its class. A :class:`Foldable` replacement can be removed by ``export``.

        Args:
            match: selects submodules. One with several paths is built once, if any of them matches.
            build: returns the replacement, which gets the ``training`` flag.
            what: the name of the submodules for messages, such as "a LayerNorm".
            unties: the replacement may drop a tensor that other modules still use.
            numbers: the replacement gets real values on the CPU even if the submodule is on the meta device.

        Returns:
            The paths replaced, including each path to a shared module.

        Raises:
            ValueError: if none matches, or one cannot be replaced, with the reason.
        """
        chosen: dict[int, str] = {}
        places: dict[int, list[str]] = {}
        found = modules_by_path(self.root, once=False)
        for path, m in found:
            places.setdefault(id(m), []).append(path)
            if id(m) not in chosen and match(path, m):
                chosen[id(m)] = path
        if id(self.root) in chosen:
            raise ValueError(
                f"{self._who}: the module itself is {what} ({type(self.root).__name__}), and a module cannot be replaced in"
                " place. Put it into another module, such as nn.Sequential."
            )
        if not chosen:
            raise ValueError(
                f"{self._who}: {type(self.root).__name__} has no {what.removeprefix('a ').removeprefix('an ')} to act on;"
                f" expected one or more. It has {_listed(self.root)}. Remove {self._who}."
            )
        old: list[nn.Module] = []

        def make(m: nn.Module) -> nn.Module:
            path = chosen[id(m)]
            tensors = tensors_of(m)
            _check_swappable(path, m, tensors, who=self._who)
            swap = Swap.of(m, tensors, by=self._who, stays=self._stays)
            rng.set_keyed(self._seed, self._who, path)
            with _made_like(tensors, home, numbers=numbers):
                new = build(m)
            if not isinstance(new, nn.Module) or new is m:
                raise TypeError(
                    f"{self._who}: the replacement of {path} is {'the module itself' if new is m else type(new).__name__};"
                    " expected another nn.Module."
                )
            keep_class(new, m)
            new.__dict__[SWAP] = swap
            old.append(m)
            return new

        used = {} if unties else _users(found)
        with rng.fork(), _without_idle_modes() as home:
            paths = self._surgery.replace(self.root, lambda m: id(m) in chosen, make, found=found)
        if not unties:
            self._check_ties(places, old, used)
        self.where += paths
        return paths

    def freeze(self, match: Callable[[str, nn.Parameter], bool]) -> list[str]:
        """Freeze the parameters for which ``match(name, parameter)`` returns True, and return their names.

        ``export`` unfreezes them. Parameters that are already frozen are skipped.
        """
        names: list[str] = []
        for path, m in modules_by_path(self.root):
            frozen: list[str] = []
            for key, p in m._parameters.items():
                name = f"{path}.{key}" if path else key
                if p is not None and p.requires_grad and match(name, p):
                    p.requires_grad_(False)
                    frozen.append(key)
                    names.append(name)
            if frozen:
                had = m.__dict__.get(FROZEN)
                self._marked.append((m, had))
                m.__dict__[FROZEN] = [*(had or []), *frozen]
        self.where += names
        return names

    def share(self, owner: nn.Module, key: str, parameter: nn.Parameter) -> None:
        """Let ``owner`` use another module's parameter, of the same shape, as its ``key``; ``export`` gives it a copy."""
        had = owner._parameters[key]
        assert had is not None and had.shape == parameter.shape, "the caller compares the blocks"
        self._shared.append((owner, key, had))
        owner._parameters[key] = parameter
        owner.__dict__[SHARED] = [*owner.__dict__.get(SHARED, ()), key]

    def before(self, module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Call ``hook`` before each call of ``module`` with its positional and keyword arguments; it may return others.

        The hook stays on the module and on copies of it, so it must be copyable.
        """
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def behind(self, module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]) -> None:
        """Call ``hook`` with the output of each call of ``module``; it may return another output.

        The hook stays on the module, as with :meth:`before`.
        """
        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def leave(self, reasons: Mapping[str, str]) -> None:
        """Log which parts were left unchanged, and why."""
        if reasons:
            listed = "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
            rank_zero_info(f"{self._who}: left unchanged: {listed}")

    def undo(self) -> None:
        """Undo all changes."""
        for owner, key, had in reversed(self._shared):
            owner._parameters[key] = had
            owner.__dict__.pop(SHARED, None)
        self._shared.clear()
        self._surgery.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for p, required in self._required:
            if p.requires_grad != required:
                p.requires_grad_(required)
        for m, had in reversed(self._marked):
            if had is None:
                m.__dict__.pop(FROZEN, None)
            else:
                m.__dict__[FROZEN] = had
        self._marked.clear()

    def _check_ties(self, places: dict[int, list[str]], old: list[nn.Module], used: dict[int, set[str]]) -> None:
        """Raise ``ValueError`` if a replacement no longer uses a tensor that its original shared with other modules."""
        shared = [
            (m, name, tensor, others)
            for m in old
            for name, tensor in tensors_of(m).items()
            if (others := [path for path in used[id(tensor)] if not _under(path, places[id(m)])])
        ]
        now = _users(self.root.named_modules(remove_duplicate=False)) if shared else {}
        for m, name, tensor, others in shared:
            if not any(_under(path, places[id(m)]) for path in now.get(id(tensor), ())):
                raise ValueError(
                    f"{self._who}: {places[id(m)][0]} ({type(m).__name__}) shares its {name} with"
                    f" {' and '.join(sorted(others))}, but the replacement does not use it, so the weights would no longer"
                    " be tied. Leave that module out."
                )


def _under(path: str, places: list[str]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


def _users(named: Iterable[tuple[str, nn.Module]]) -> dict[int, set[str]]:
    """Return the paths of the modules that register each tensor, by its id."""
    found: dict[int, set[str]] = {}
    for path, m in named:
        for tensor in (*m._parameters.values(), *m._buffers.values()):
            if tensor is not None:
                found.setdefault(id(tensor), set()).add(path)
    return found


def _check_swappable(path: str, m: nn.Module, named: Mapping[str, Tensor], *, who: str) -> None:
    """Raise ``ValueError`` if a module has hooks or other attachments that a replacement would lack."""
    problem, mend = "", "Leave it out, or remove that first"
    tensors = list(named.values())
    if any(isinstance(t, DTensor) for t in tensors):
        problem = "has sharded parameters (DTensor)"
        mend = "Call lightning_eff.apply(part, technique) in configure_model before it shards them"
    elif any(is_lazy(t) for t in tensors):
        problem, mend = "is lazy and has no parameters yet", "Run the module once on a batch first"
    elif is_parametrized(m):
        problem = "is parametrized (torch.nn.utils.parametrize)"
    elif "forward" in m.__dict__:
        problem = "has its own forward on the instance"
    elif has_hooks(m):
        problem = "has hooks (as torch.nn.utils.weight_norm sets them, or accelerate's device maps)"
    if problem:
        raise ValueError(f"{who}: {path} ({type(m).__name__}) {problem}, which its replacement would not have. {mend}.")


@contextmanager
def _made_like(tensors: Mapping[str, Tensor], home: torch.device, *, numbers: bool) -> Iterator[None]:
    """Create tensors by default with the device and dtype of the first floating-point tensor of ``tensors``, or on ``home``."""
    first = next((t for t in tensors.values() if t.is_floating_point()), None)
    if first is None:
        with _on(home):
            yield
        return
    before = torch.get_default_dtype()
    device = torch.device("cpu") if numbers and first.is_meta else first.device
    torch.set_default_dtype(first.dtype if _settable(first) else before)
    try:
        with _on(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Create tensors on ``device``. Nothing is entered where torch does so anyway, because the context slows every call."""
    return nullcontext() if _creates_on(device) else device


@contextmanager
def _without_idle_modes() -> Iterator[torch.device]:
    """Leave function modes that only set the device of new tensors, which is returned, because they slow every call.

    Lightning configures a module under two modes. One sets the device, and the other does nothing by default.
    """
    home, modes = torch.get_default_device(), _get_current_function_mode_stack()
    left = [_pop_mode() for _ in modes] if all(map(_is_idle, modes)) else []
    try:
        yield home
    finally:
        for mode in reversed(left):
            _push_mode(mode)


def _is_idle(mode: TorchFunctionMode) -> bool:
    return isinstance(mode, DeviceContext) or (
        type(mode).__name__ == "_EmptyInit" and not getattr(mode, "enabled", True)
    )


def _creates_on(device: torch.device) -> bool:
    return torch._C._len_torch_function_stack() == 0 and torch.get_default_device() == device


def _settable(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _listed(root: nn.Module) -> str:
    """Return the classes of parts with parameters of their own, and their counts."""
    counts: dict[str, int] = {}
    for path, m in root.named_modules():
        if path and any(p is not None for p in m._parameters.values()):
            counts[type(m).__name__] = counts.get(type(m).__name__, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no parts with parameters"
