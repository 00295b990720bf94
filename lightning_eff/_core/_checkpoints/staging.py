"""A copy in host memory of what a checkpoint saves, so that training can continue while the copy is written."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

_ATOMS = (type(None), bool, int, float, complex, str, bytes)


def staged(value: Any, memo: dict[Any, Tensor] | None = None) -> Any:
    """Return a copy of a state that shares no memory with it: tensors on the CPU, other objects by ``copy.deepcopy``.

    Only local parts are copied, and nothing is communicated. Tensors that share memory are copied once.
    """
    memo = {} if memo is None else memo
    if isinstance(value, _ATOMS):
        return value
    if type(value) in (dict, OrderedDict):
        made = copy.copy(value)  # with the attribute _metadata of a state_dict
        for key, inner in value.items():
            made[key] = staged(inner, memo)
        return made
    if type(value) in (list, tuple):
        return type(value)(staged(inner, memo) for inner in value)
    if isinstance(value, ShardedTensor):
        return _of_shards(value, memo)
    if type(value) is Tensor or isinstance(value, DTensor):
        return _of_tensor(value, memo)
    return copy.deepcopy(value)


def _of_tensor(tensor: Tensor, memo: dict[Any, Tensor]) -> Tensor:
    if tensor.is_meta:
        return tensor
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if here.layout != torch.strided or here.numel() == 0:
        return _copied(tensor)
    key = (type(tensor), tensor.shape, here.data_ptr(), here.shape, here.stride(), here.dtype, here.device)
    if key not in memo:
        memo[key] = _copied(tensor)
    return memo[key]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)


def _of_shards(tensor: ShardedTensor, memo: dict[Any, Tensor]) -> ShardedTensor:
    """Return a copy of FSDP1's kind of tensor with the same metadata, without its checks, which are collective."""
    made = copy.copy(tensor)
    made._local_shards = [copy.copy(shard) for shard in tensor.local_shards()]
    for shard in made._local_shards:
        shard.tensor = _of_tensor(shard.tensor, memo)
    return made
