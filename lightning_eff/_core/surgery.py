"""Replace submodules in place, before the optimizer is built and the strategy wraps the module."""

from collections.abc import Callable

from torch import nn


class Surgery:
    """Replacements in one module tree, undone newest first.

    A replacement must register the original's own parameters and buffers under the same names. Then the ``state_dict``, the
    optimizer and every checkpoint stay those of the plain module.

    Args:
        same_tensors: False for techniques that add parameters; see ``_core._architecture``.
    """

    def __init__(self, *, same_tensors: bool = True) -> None:
        self._same_tensors = same_tensors
        self._undo: list[tuple[nn.Module, str, nn.Module]] = []

    def replace(
        self,
        root: nn.Module,
        match: Callable[[nn.Module], bool],
        build: Callable[[nn.Module], nn.Module],
        *,
        found: list[tuple[str, nn.Module]] | None = None,
    ) -> list[str]:
        """Replace each submodule of ``root`` for which ``match`` returns True by ``build(submodule)``, innermost first.

        Args:
            root: the module tree; ``root`` itself is not replaced.
            match: selects submodules. Replacements are not matched again.
            build: returns the replacement, which gets the original's ``training`` flag.
            found: all modules by path, also those with several paths, if the caller has walked the tree.

        Returns:
            The dotted paths replaced, as in ``root.named_modules``. A module with several paths is built once.

        Raises:
            ValueError: if a replacement's parameters or buffers are not those of the original, by name and identity.
        """
        built: dict[int, nn.Module] = {}
        made: set[int] = set()
        paths: set[str] = set()
        if found is None:
            found = list(root.named_modules(remove_duplicate=False))
        for path, parent in reversed(found):  # innermost first
            for name, child in list(parent._modules.items()):
                if child is None or (id(child) not in made and not match(child)):
                    continue
                where = f"{path}.{name}" if path else name
                if id(child) not in made:
                    new = built.get(id(child))
                    if new is None:
                        new = built[id(child)] = build(child)
                        if self._same_tensors:
                            _check_same_tensors(child, new, where)
                        new.training = child.training
                        made.add(id(new))
                    self._undo.append((parent, name, child))
                    parent._modules[name] = new
                paths.add(where)
        return [path for path, _ in found if path in paths]

    def restore(self) -> None:
        """Restore every replaced submodule."""
        while self._undo:
            parent, name, child = self._undo.pop()
            new = parent._modules[name]
            child.training = child.training if new is None else new.training
            parent._modules[name] = child


def _check_same_tensors(old: nn.Module, new: nn.Module, path: str) -> None:
    def names(module: nn.Module) -> dict[str, tuple[int, bool]]:
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        saved = module.state_dict()
        return {name: (id(tensor), name in saved) for name, tensor in named}

    had, has = names(old), names(new)
    if had != has:
        changed = sorted(name for name in had.keys() | has.keys() if had.get(name) != has.get(name))
        raise ValueError(
            f"The replacement {type(new).__name__} of {path} ({type(old).__name__}) has different tensors at {changed};"
            " expected the same parameters and buffers under the same names, with the same persistence. Register the"
            " original's tensors."
        )
