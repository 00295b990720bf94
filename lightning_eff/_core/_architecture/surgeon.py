"""What a technique changes an architecture with: submodules swapped for others, parameters frozen, all or nothing."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from lightning_eff._core import rng
from lightning_eff._core._architecture.record import FROZEN, SWAP, Swap, tensors_of
from lightning_eff._core._architecture.stand_ins import keep_class
from lightning_eff._core.surgery import Surgery

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Surgeon:
    """One technique's hand on one module.

    Random numbers that a replacement's making draws follow from the run's seed, the technique and the path alone, and leave
    the global stream as it was: the same seed gives the same parameters in a Trainer and through ``lightning_eff.apply``.

    Attributes:
        root: the module tree.
        where: paths of what was swapped and of parameters that were frozen, so far.
        batch: of the module's data, for what must see it run; None where none was given.

    Args:
        root: the module tree.
        seed: the run's seed.
        who: the technique's class, for messages.
        stays: why what it puts in cannot be taken out again; empty where each replacement has ``fold``.
        batch: see above.
    """

    def __init__(self, root: nn.Module, *, seed: int, who: str, stays: str = "", batch: Any = None) -> None:
        self.root = root
        self.batch = batch
        self.where: list[str] = []
        self._seed, self._who, self._stays = seed, who, stays
        self._surgery = Surgery(same_tensors=False)
        self._required = [(p, p.requires_grad) for p in root.parameters()]
        self._marked: list[tuple[nn.Module, list[str] | None]] = []
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
        """Put ``build(submodule)`` in the place of each submodule for which ``match(path, submodule)`` holds.

        While ``build`` runs, what it makes is by default on the device and of the dtype of the submodule's parameters. It
        may register them under their own names or others, and freeze them. What replaces a linear layer or a convolution
        stays an instance of its class. A replacement that is :class:`Foldable` lets
        ``export`` take it out.

        Args:
            match: which submodules; one that is reachable by several paths is built once, if any of them is met.
            build: makes the replacement, which takes over the ``training`` flag.
            what: what is looked for, in the words of messages, e.g. "a LayerNorm".
            unties: the replacement may do without a tensor that other modules go on using.
            numbers: what is made has numbers at once, on the CPU, also where the submodule lies on the meta device.

        Returns:
            The paths swapped, each way to a shared module.

        Raises:
            ValueError: if none is met, with what there is, or one cannot be swapped, with the reason.
        """
        chosen: dict[int, str] = {}
        places: dict[int, list[str]] = {}
        for path, m in self.root.named_modules(remove_duplicate=False):
            places.setdefault(id(m), []).append(path)
            if id(m) not in chosen and match(path, m):
                chosen[id(m)] = path
        if id(self.root) in chosen:
            raise ValueError(
                f"{self._who}: the module itself is {what} ({type(self.root).__name__}); expected a module that has such parts,"
                " since a module cannot be exchanged in place. Put it into another, such as nn.Sequential."
            )
        if not chosen:
            raise ValueError(
                f"{self._who}: {type(self.root).__name__} has no {what.removeprefix('a ').removeprefix('an ')} to act on;"
                f" expected one or more. It has {_listed(self.root)}. Remove {self._who}."
            )
        old: list[nn.Module] = []

        def make(m: nn.Module) -> nn.Module:
            path = chosen[id(m)]
            _check_swappable(path, m, who=self._who)
            swap = Swap.of(m, by=self._who, stays=self._stays)
            with rng.keyed(self._seed, self._who, path), _made_like(m, numbers=numbers):
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

        used = _users(self.root)
        paths = self._surgery.replace(self.root, lambda m: id(m) in chosen, make)
        if not unties:
            self._check_ties(places, old, used)
        self.where += paths
        return paths

    def freeze(self, match: Callable[[str, nn.Parameter], bool]) -> list[str]:
        """Let no gradient be computed for the parameters for which ``match(name, parameter)`` holds; their names.

        ``export`` gives them back as they were. Those that are frozen already are not looked at.
        """
        names: list[str] = []
        for path, m in self.root.named_modules():
            frozen: list[str] = []
            for key, p in m.named_parameters(recurse=False):
                name = f"{path}.{key}" if path else key
                if p.requires_grad and match(name, p):
                    p.requires_grad_(False)
                    frozen.append(key)
                    names.append(name)
            if frozen:
                had = m.__dict__.get(FROZEN)
                self._marked.append((m, had))
                m.__dict__[FROZEN] = [*(had or []), *frozen]
        self.where += names
        return names

    def before(self, module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Let ``hook`` look at each call of ``module``: its arguments by position and by name, or return others.

        The hook stays with the module, in copies of it too, which must be able to copy it.
        """
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def behind(self, module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]) -> None:
        """Let ``hook`` look at what each call of ``module`` returns, and return it or something else in its place.

        It stays as one of :meth:`before` does.
        """
        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def leave(self, reasons: Mapping[str, str]) -> None:
        """Tell the user, once, what was left as it is, and why."""
        if reasons:
            listed = "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
            rank_zero_info(f"{self._who}: left as they are: {listed}")

    def undo(self) -> None:
        """Put back everything."""
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
        """That a tensor which others use too is still used by what came into this module's place."""
        now = _users(self.root)
        for m in old:
            for name, tensor in tensors_of(m).items():
                others = [path for path in used[id(tensor)] if not _under(path, places[id(m)])]
                if others and not any(_under(path, places[id(m)]) for path in now.get(id(tensor), ())):
                    raise ValueError(
                        f"{self._who}: the {name} of {places[id(m)][0]} ({type(m).__name__}) is that of"
                        f" {' and '.join(sorted(others))} too, and the replacement does without it: the weights would no longer"
                        " be tied. Leave that module out."
                    )


def _under(path: str, places: list[str]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


def _users(root: nn.Module) -> dict[int, set[str]]:
    """Paths of the modules that register each tensor, by its id."""
    found: dict[int, set[str]] = {}
    for path, m in root.named_modules(remove_duplicate=False):
        for tensor in [*m.parameters(recurse=False), *m.buffers(recurse=False)]:
            found.setdefault(id(tensor), set()).add(path)
    return found


def _check_swappable(path: str, m: nn.Module, *, who: str) -> None:
    """Raise ``ValueError`` where something hangs on the module that a replacement would not have."""
    problem, mend = "", "Leave it out, or take that away before"
    tensors = list(tensors_of(m).values())
    if any(isinstance(t, DTensor) for t in tensors):
        problem = "has divided parameters (DTensor)"
        mend = "Call lightning_eff.apply(part, technique) in configure_model before it divides them"
    elif any(is_lazy(t) for t in tensors):
        problem, mend = "is lazy and has no parameters yet", "Run the module once on a batch before"
    elif is_parametrized(m):
        problem = "is parametrized (torch.nn.utils.parametrize)"
    elif "forward" in m.__dict__:
        problem = "has a forward of its own on the instance"
    elif any(getattr(m, name) for name in _HOOKS):
        problem = "has hooks (as torch.nn.utils.weight_norm sets them, or accelerate's device maps)"
    if problem:
        raise ValueError(f"{who}: {path} ({type(m).__name__}) {problem}, which its replacement would not have. {mend}.")


@contextmanager
def _made_like(m: nn.Module, *, numbers: bool) -> Iterator[None]:
    """What is made within is by default on the device, and of the dtype, of the first floating tensor of ``m``."""
    first = next((t for t in tensors_of(m).values() if t.is_floating_point()), None)
    if first is None:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(first.dtype if _settable(first) else before)
    try:
        with torch.device("cpu" if numbers and first.is_meta else first.device):
            yield
    finally:
        torch.set_default_dtype(before)


def _settable(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _listed(root: nn.Module) -> str:
    """The classes of parts that have parameters of their own, and how many there are."""
    counts: dict[str, int] = {}
    for path, m in root.named_modules():
        if path and any(True for _ in m.parameters(recurse=False)):
            counts[type(m).__name__] = counts.get(type(m).__name__, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no parts with parameters"
