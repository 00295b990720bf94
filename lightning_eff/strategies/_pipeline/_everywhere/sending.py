"""Sends any value from one pipeline rank to all."""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override


class _Pickler(pickle.Pickler):
    """Pickles everything except tensors, which it collects with their index in ``given``."""

    def __init__(self, file: io.BytesIO, given: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._given = {_place(tensor): i for i, tensor in enumerate(given)}

    @override
    def persistent_id(self, obj: Any) -> tuple[int, int | None] | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj.detach())
        return len(self.tensors) - 1, self._given.get(_place(obj)) if self._given else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], given: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.tensors, self.given = tensors, given

    @override
    def persistent_load(self, pid: tuple[int, int | None]) -> Tensor:
        tensor = self.tensors[pid[0]]
        if pid[1] is None:
            return tensor
        given = self.given[pid[1]]
        if not torch.equal(given, tensor):
            given.copy_(tensor)  # the source changed it in place
        return given


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def broadcast(value: Any, source: int, group: ProcessGroup, device: torch.device, given: Sequence[Tensor] = ()) -> Any:
    """Return the ``value`` of group rank ``source`` on every rank; everything except tensors is pickled.

    Args:
        value: the value, which only matters on ``source``.
        source: the group rank that sends.
        group: the ranks.
        device: device for messages.
        given: tensors that every rank has. If ``value`` contains one, the result has the rank's tensor, with the content from
            ``source``.
    """
    mine = dist.get_rank(group) == source
    told: list[Any] = [None]
    tensors: list[Tensor] = []
    if mine:
        file = io.BytesIO()
        pickler = _Pickler(file, given)
        pickler.dump(value)
        tensors = [tensor.to(device).contiguous() for tensor in pickler.tensors]
        told = [(file.getvalue(), [(tuple(tensor.shape), tensor.dtype) for tensor in tensors])]
    dist.broadcast_object_list(told, group_src=source, group=group)
    pickled, shapes = told[0]
    if not mine:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    for tensor in tensors:
        dist.broadcast(tensor, group_src=source, group=group)
    return value if mine else _Unpickler(io.BytesIO(pickled), tensors, given).load()
