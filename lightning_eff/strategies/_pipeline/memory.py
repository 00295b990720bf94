"""Decides which parameters a pipeline rank holds, and frees the others without changing names."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_eff._core.blocks import InPlaceOf
from lightning_eff.strategies._pipeline.layout import Layout
from lightning_eff.strategies._pipeline.stack import Stack


def emptied(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, type and device with the memory of one element and no gradient.

    Its values are NaN, or zero if the type has no NaN. So a step that unexpectedly uses a value shows this in its loss.
    """
    fill = math.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    if isinstance(tensor, DTensor):
        own = tensor.to_local()
        local = torch.full((), fill, dtype=tensor.dtype, device=own.device).expand(own.shape)
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return torch.full((), fill, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


class Freed(InPlaceOf):
    """Replaces a block that another rank owns."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"A {type(self.__dict__['_block']).__name__} was called outside a step, but another pipeline rank owns it. Move the"
            " call into training_step, validation_step, test_step or predict_step."
        )


@dataclass(frozen=True)
class Holdings:
    """The stages that use each parameter, by its first name in the whole module.

    Attributes:
        stages: stages that need the value of each parameter.
        names: all names of each parameter; tied weights have several.
        certain: whether the use of parameters outside the blocks is known. If not, every stage keeps all of them.
    """

    stages: dict[str, tuple[int, ...]]
    names: dict[str, tuple[str, ...]]
    certain: bool

    def ranks(self, name: str, where: Layout) -> tuple[int, ...]:
        """Return the pipeline ranks that hold a parameter."""
        return tuple(sorted({where.ranks[stage] for stage in self.stages[name]}))


def registered(module: nn.Module, *names: str) -> nn.Parameter:
    """Return the registered parameter, from which the attribute can differ under tensor parallelism.

    Args:
        module: the module, whole or cut.
        names: names of the parameter. The first that exists counts, since blocks that share it can be gone.
    """
    for name in names:
        path, _, key = name.rpartition(".")
        p = module.get_submodule(path)._parameters.get(key)
        if p is not None:
            return p
    raise LookupError(f"no parameter is registered as {' or '.join(names)}")


def names_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of every parameter by its first name, in the module's order."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(first.setdefault(id(p), name), []).append(name)
    return {name: tuple(more) for name, more in names.items()}


def in_blocks(module: nn.Module, stack: Stack, where: Layout) -> dict[str, set[int]]:
    """Return the stages whose blocks hold each parameter, by its first name; empty outside the blocks."""
    of_block = [{id(p) for p in block.parameters()} for block in stack.blocks]
    return {
        name: {where.stage_of(i) for i, ids in enumerate(of_block) if id(p) in ids}
        for name, p in module.named_parameters()
    }


def holdings(module: nn.Module, stack: Stack, where: Layout, outside: dict[str, set[int]] | None) -> Holdings:
    """Collect which stages use which parameters.

    All stages hold a parameter that none was seen to use, because a later batch could need it on any stage.

    Args:
        module: the whole module.
        stack: its blocks.
        where: the layout.
        outside: for each parameter's first name, the stages that use it outside their blocks; None if unknown.
    """
    inside = in_blocks(module, stack, where)
    everywhere = set(range(where.num_stages))
    stages = {}
    for name, own in inside.items():
        if outside is not None:
            used = own | outside.get(name, set())
        else:
            used = own if only_in_blocks(module, name, stack) else everywhere
        stages[name] = tuple(sorted(used or everywhere))
    return Holdings(stages, names_of(module), outside is not None)


def owners(keys: Iterable[str], stack: Stack, where: Layout, whole: Holdings) -> dict[str, int]:
    """Return the pipeline rank that saves each key of the whole module's ``state_dict``.

    A block's owner saves its keys, and the first holder saves other parameters. The last stage saves buffers outside the
    blocks, because only it runs all code outside the blocks.
    """
    first = {each: whole.ranks(name, where)[0] for name, names in whole.names.items() for each in names}
    prefixes = {f"{name}.": where.ranks[where.stage_of(i)] for i, name in enumerate(stack.names)}
    owner: dict[str, int] = {}
    for key in keys:
        block = next((rank for start, rank in prefixes.items() if key.startswith(start)), None)
        owner[key] = first.get(key, where.last_rank) if block is None else block
    return owner


@dataclass
class Gone:
    """A parameter that a rank freed.

    Attributes:
        parameter: the object, without memory.
        like: its shape, type and, under tensor parallelism, placement.
        places: the modules in which it was registered, with its names.
    """

    parameter: nn.Parameter
    like: Tensor
    places: list[tuple[nn.Module, str]]


def free(module: nn.Module, stack: Stack, owned: Iterable[int], keep: set[int]) -> dict[str, Gone]:
    """Free every parameter whose id is not in ``keep``, and the buffers of blocks that are not ``owned``.

    The names of other parameters do not change. A freed parameter becomes a plain attribute of the same shape with NaN,
    because the user's code outside the blocks still runs on every stage.

    Returns:
        The freed parameters by first name.
    """
    mine = set(owned)
    gone = {id(p): p for p in module.parameters() if id(p) not in keep}
    instead = {key: emptied(p.detach()) for key, p in gone.items()}
    found = {id(p): (name, Gone(p, instead[id(p)], [])) for name, p in module.named_parameters() if id(p) in gone}
    theirs = [m for i, block in enumerate(stack.blocks) if i not in mine for m in block.modules()]
    ours = {id(m) for i, block in enumerate(stack.blocks) if i in mine for m in block.modules()}
    for m in module.modules():
        for name, p in list(m._parameters.items()):
            if p is not None and id(p) in gone:
                with torch.no_grad():  # a tensor-parallel parameter is read as a plain tensor
                    read = getattr(m, name) if isinstance(p, DTensor) else p
                del m._parameters[name]
                found[id(p)][1].places.append((m, name))
                m.__dict__[name] = instead[id(p)] if read is p else emptied(read.detach())
    for m in theirs:
        if id(m) not in ours:
            for name, buffer in list(m._buffers.items()):
                if buffer is not None:
                    m._buffers[name] = emptied(buffer)
    for key, p in gone.items():  # so that other references hold no memory
        if not isinstance(p, DTensor):
            p.data = instead[key]
        p.grad = None
    stack.show([block if i in mine else Freed(block) for i, block in enumerate(stack.blocks)])
    return dict(found.values())


def only_in_blocks(module: nn.Module, name: str, stack: Stack) -> bool:
    """Whether the parameter of that name is registered only in blocks."""
    inside = {id(m) for block in stack.blocks for m in block.modules()}
    p = registered(module, name)
    owners = [m for m in module.modules() if any(q is p for q in m._parameters.values())]
    return all(id(m) in inside for m in owners)
