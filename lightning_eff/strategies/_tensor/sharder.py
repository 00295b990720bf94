"""Applies tensor-parallel styles to modules, and can undo them.

``nn.Linear`` and ``nn.Embedding`` get torch's styles (torch.distributed.tensor.parallel). Other cases use the same DTensor
collectives. These are transformers' ``Conv1D`` (its weight is transposed), subclasses of ``nn.Linear`` with another forward,
fused weights with several sections, and parameters that are stored in parts and gathered when they are read.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from lightning_eff._core._architecture.linear_maps import is_conv1d
from lightning_eff.strategies._tensor.access import Read, clear_read, own_class, set_read
from lightning_eff.strategies._tensor.sections import Exchange
from lightning_eff.strategies._tensor.styles import (
    ANY_STYLES,
    PACKED,
    WHOLE,
    Style,
    even_dim,
    features,
    misfit,
    names_of,
    owners,
    sections_of,
)

_TORCH: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
}


class Sharder:
    """Applies styles to the modules of ``root`` on ``mesh``, and keeps shared parameters shared.

    Attributes:
        size: number of tensor-parallel ranks.
        copies: whether split layers return copies, which code can change in place, instead of views of DTensors.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh) -> None:
        self.root, self.mesh, self.size = root, mesh, mesh.size()
        self.copies = False
        self._hooked: dict[int, nn.Module] = {}
        self._saved: dict[int, tuple[nn.Module, type[nn.Module], dict[str, Any]]] = {}
        self._owners = owners(root)

    # -- undoing

    def copy_outputs(self) -> None:
        """Let split layers return copies, including those split already."""
        self.copies = True
        for module in self._hooked.values():
            module.register_forward_hook(_copied)

    def commit(self) -> None:
        """Free the whole parameters, which only :meth:`undo` needs."""
        self._saved.clear()

    def _save(self, module: nn.Module) -> None:
        if id(module) not in self._saved:
            space = {k: dict(v) if type(v) is dict else v for k, v in module.__dict__.items()}
            for key, value in module.__dict__.items():
                if type(value) is not dict and isinstance(value, dict):  # the hooks' OrderedDicts
                    space[key] = type(value)(value)
            self._saved[id(module)] = (module, type(module), space)

    def undo(self) -> None:
        """Restore all modules with the same parameter objects as before."""
        for module, cls, space in self._saved.values():
            object.__setattr__(module, "__class__", cls)
            for key in [key for key in module.__dict__ if key not in space]:
                del module.__dict__[key]
            for key, value in space.items():
                current = module.__dict__.get(key)
                if isinstance(current, dict) and isinstance(value, dict):
                    current.clear()  # in place, since other objects can refer to the dictionary
                    current.update(value)
                else:
                    module.__dict__[key] = value
        self._saved.clear()
        self._hooked.clear()
        self._owners = owners(self.root)

    # -- parameters

    def set_attribute(self, module: nn.Module, name: str, value: int) -> None:
        """Set a plain attribute, such as a number of heads."""
        self._save(module)
        setattr(module, name, value)

    def place(self, module: nn.Module, name: str, placement: Placement) -> nn.Parameter:
        """Turn the parameter into a DTensor with ``placement``, in every module that owns it.

        Raises:
            ValueError: if it is shared and has another placement already.
        """
        old = module._parameters[name]
        assert old is not None
        if isinstance(old, DTensor):
            if tuple(old.placements) != (placement,):
                raise ValueError(f"{name!r} is shared and already placed as {old.placements}")
            return old
        with torch.no_grad():
            value = distribute_tensor(old.detach(), self.mesh, [placement], src_data_rank=None)
            value = DTensor.from_local(
                value.to_local().clone(),
                self.mesh,
                [placement],
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        self._adopt(old, new)
        return new

    def _adopt(self, old: nn.Parameter, new: nn.Parameter) -> None:
        self._owners[id(new)] = self._owners.pop(id(old))
        assert isinstance(new, DTensor)
        for _, owner, name in self._owners[id(new)]:
            self._save(owner)
            owner._parameters[name] = new
            set_read(owner, name, Read("whole"))

    def store(self, module: nn.Module, name: str, dim: int) -> None:
        """Split the storage of one parameter along ``dim``; reads return the whole parameter."""
        self.place(module, name, Shard(dim))

    # -- styles

    def apply(self, path: str, style: Style) -> None:
        """Apply the style to the module at ``path``.

        Raises:
            ValueError: if the style does not fit the module.
        """
        module = self.root.get_submodule(path)
        reason = misfit(module, style, self.size)
        if reason is not None:
            raise ValueError(f"{path!r} cannot be {style}: {reason}")
        self._save(module)
        self._split(module, style)
        if style.name not in ANY_STYLES or style.name == "sequence_parallel":
            self._hooked[id(module)] = module
            if self.copies:
                module.register_forward_hook(_copied)

    def _split(self, module: nn.Module, style: Style) -> None:
        if style.name in ANY_STYLES:
            self._apply_any(module, style)
        elif _is_plain(module) and style.name not in (PACKED, WHOLE):
            self._apply_torch(module, style)
        elif style.name.startswith("rowwise"):
            self._apply_rows(module, split=style.name == "rowwise_split_input")
        else:
            self._apply_columns(module, style)

    def _apply_any(self, module: nn.Module, style: Style) -> None:
        partial = style.name in ("replicated_with_grad_allreduce", "sequence_parallel")
        for name in names_of(module):
            param = module._parameters[name]
            assert param is not None
            dim = even_dim(param.shape, self.size) if style.name == "gather" else None
            if not isinstance(param, DTensor):
                self.place(module, name, Replicate() if dim is None else Shard(dim))
            set_read(module, name, Read("whole", partial=partial))
        if style.name == "sequence_parallel":
            parts = _SequenceParts(self.mesh)
            self._hook(module, parts.split, parts.gather)

    def _apply_torch(self, module: nn.Module, style: Style) -> None:
        rows = style.name.startswith(("rowwise", "embedding_colwise"))
        for name in names_of(module):
            self.place(module, name, (Replicate() if name == "bias" else Shard(1)) if rows else Shard(0))
            clear_read(module, name)  # torch's style computes with the DTensor
        placed = dict(module._parameters)
        made = _TORCH[style.name]()
        made.src_data_rank = None
        parallelize_module(module, self.mesh, made)
        for (
            name,
            param,
        ) in placed.items():  # torch creates new Parameter objects of the same tensors, so share them again
            module._parameters[name] = param

    def _apply_columns(self, module: nn.Module, style: Style) -> None:
        conv = is_conv1d(module)
        group = self.mesh.get_group()
        exchange = Exchange(sections_of(module, style), group) if style.name == PACKED else None
        for name in names_of(module):
            if style.name == WHOLE:
                param = module._parameters[name]
                dim = None if param is None else even_dim(param.shape, self.size)
                self.place(module, name, Replicate() if dim is None else Shard(dim))
                set_read(module, name, Read("whole", partial=True))
            else:
                self.place(module, name, Shard(1 if conv and name == "weight" else 0))
                set_read(module, name, Read("local", exchange=exchange, columns=conv))
        if conv and style.name != WHOLE:
            self.set_attribute(module, "nf", features(module)[1] // self.size)
        gather = style.name == "colwise_gather_output"
        self._hook(
            module,
            lambda x: DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            ),
            (lambda y: _redistribute(y, self.mesh, Shard(-1), Replicate())) if gather else None,
        )

    def _apply_rows(self, module: nn.Module, *, split: bool) -> None:
        conv = is_conv1d(module)
        self.place(module, "weight", Shard(0 if conv else 1))
        set_read(module, "weight", Read("local"))
        if module._parameters.get("bias") is not None:
            self.place(module, "bias", Replicate())
            set_read(module, "bias", Read("zero"))

        def summed(y: Tensor) -> Tensor:
            y = _redistribute(y, self.mesh, Partial(), Replicate())
            bias = module._parameters.get("bias")
            return y if bias is None else y + (bias.to_local() if isinstance(bias, DTensor) else bias).to(y.dtype)

        self._hook(module, (lambda x: _redistribute(x, self.mesh, Replicate(), Shard(-1))) if split else None, summed)

    def _hook(
        self, module: nn.Module, before: Callable[[Tensor], Tensor] | None, after: Callable[[Tensor], Tensor] | None
    ) -> None:
        if before is not None:

            def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
                if args:
                    return (before(args[0]), *args[1:]), kwargs
                first = next(iter(kwargs))
                return args, {**kwargs, first: before(kwargs[first])}

            module.register_forward_pre_hook(enter, with_kwargs=True)
        if after is not None:

            def leave(_: nn.Module, __: Any, y: Any) -> Any:
                return after(y)

            module.register_forward_hook(leave)

    def finish(self) -> None:
        """Turn all other parameters into replicated DTensors, so that all parameters are on one mesh."""
        for module in self.root.modules():
            for name in names_of(module):
                if not isinstance(module._parameters[name], DTensor) and type(module._parameters[name]) is nn.Parameter:
                    self.place(module, name, Replicate())


class _SequenceParts:
    """Runs a module that treats positions equally on each rank's part of dimension 1, and gathers the result."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.length = mesh, 0

    def split(self, x: Tensor) -> Tensor:
        """Return this rank's part (B, about T / size, ...) of (B, T, ...)."""
        self.length = x.shape[1]
        return _redistribute(x, self.mesh, Replicate(), Shard(1))

    def gather(self, y: Tensor) -> Tensor:
        """Join all ranks' parts, which can have different lengths, to (B, T, ...)."""
        shape = torch.Size((y.shape[0], self.length, *y.shape[2:]))
        stride = torch.empty(shape, device="meta").stride()
        parts = DTensor.from_local(y.contiguous(), self.mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)
        return parts.redistribute(placements=[Replicate()]).to_local()


def _is_plain(module: nn.Module) -> bool:
    """Whether torch's styles fit. They pass DTensors to the forward, which must be torch's."""
    return own_class(module) in (nn.Linear, nn.Embedding) and "forward" not in module.__dict__


def _copied(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.clone()


def _redistribute(x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    return DTensor.from_local(x, mesh, [source], run_check=False).redistribute(placements=[target]).to_local()
