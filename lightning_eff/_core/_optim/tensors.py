"""A module's parameters and buffers by name, without a walk of the module tree in every step."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core._stack.walking import modules_by_path, parameters_by_name
from lightning_eff._core.session import Session


class Tensors:
    """The tensors of a session's module. The tree is walked again only if it has other modules, parameters or buffer names.

    A change is found by the identities of all submodules and parameters, so modules that grow, are replaced or get new
    parameters are seen in the next step. A buffer may be another tensor in every step, and is looked up by its name.

    Args:
        session: the run.
        reshard: whether :meth:`look` shards parameters again that FSDP2 has left whole after a forward pass.

    Attributes:
        parameters: the parameters by name, as of the last :meth:`look`.
    """

    def __init__(self, session: Session, *, reshard: bool = True) -> None:
        self.session, self._reshard = session, reshard
        self._root: Any = None
        self._seen: Any = None
        self._modules: list[tuple[str, nn.Module]] = []
        self._sharded: list[Any] = []
        self._buffers: list[tuple[str, dict[str, Tensor | None], str]] = []
        self.parameters: dict[str, nn.Parameter] = {}

    def look(self) -> None:
        """Walk the module tree if it has changed."""
        for m in self._sharded:
            m.reshard()
        if self._root is not self._current_root() or self._sight() != self._seen:
            self._walk()

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers by name."""
        for name, held, key in self._buffers:
            value = held[key]
            if value is not None:
                yield name, value

    def modes(self) -> dict[str, bool]:
        """``training`` of every submodule, by its path."""
        return {name: m.training for name, m in self._modules}

    def _current_root(self) -> Any:
        return self.session.trainer.strategy.model or self.session.module

    def _sight(self) -> tuple[list[int], list[str], list[int]]:
        """The identities of all submodules and parameters, all names including buffers', and how many each module has.

        The objects are held here, so no other one can have the same identity.
        """
        tables = [table for _, m in self._modules for table in (m._modules, m._parameters)]
        named = [*tables, *(m._buffers for _, m in self._modules)]
        identities = map(id, chain.from_iterable(table.values() for table in tables))
        return [*identities], [*chain.from_iterable(named)], [*map(len, named)]

    def _walk(self) -> None:
        self._root, module = self._current_root(), self.session.module
        self._sharded = []
        if self._reshard and not is_plain(self.session.trainer.strategy):
            from torch.distributed.fsdp import FSDPModule

            self._sharded = [m for m in self._root.modules() if isinstance(m, FSDPModule)]
            for m in self._sharded:
                m.reshard()
        self._modules = modules_by_path(module)
        self.parameters = dict(parameters_by_name(module))
        names = {name for name, _ in module.named_buffers()}  # each tensor once
        self._buffers = [
            (name, m._buffers, key)
            for path, m in self._modules
            for key in m._buffers
            if (name := f"{path}.{key}" if path else key) in names
        ]
        self._seen = self._sight()


def piece(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: the local part of a DTensor. Writing to it writes to the tensor."""
    held = tensor.detach()
    return held.to_local() if hasattr(held, "to_local") else held  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def pieces(tensors: Tensors) -> dict[str, Tensor]:
    """This process's part of the module's parameters and buffers, by name."""
    tensors.look()
    held = (t for t in (*tensors.parameters.items(), *tensors.buffers()))
    return {name: piece(t) for name, t in held}
