"""``lightning_eff.dequantize``: turn quantised linear layers into plain ones with the rounded weights."""

import copy
from typing import TypeVar, cast

from torch import nn

from lightning_eff._core._architecture.record import APPLIED, swap_of
from lightning_eff.model.adapters._optional import imported

WHO = "lightning_eff.dequantize"
M = TypeVar("M", bound=nn.Module)


def dequantize(module: M) -> M:
    """Return a copy of ``module`` with plain linear layers, which hold the rounded weights of :class:`QuantizedBase`.

    The copy computes the same as ``module``, up to rounding, and needs the memory of the plain module. LoRA's factors were
    trained with the rounded weights. ``lightning_eff.export(lightning_eff.dequantize(module))`` therefore merges them into
    those, and not into the original weights.

    Args:
        module: a module after a fit, or after ``lightning_eff.apply`` and the loading of a checkpoint, or a part of it.

    Raises:
        ValueError: if :class:`QuantizedBase` has rounded nothing in ``module``.
        ImportError: if bitsandbytes is not installed.
    """
    imported("bitsandbytes", extra="bitsandbytes", who=WHO)
    from lightning_eff.model.adapters._quantized.layers import QuantizedLinear, plain_tensors

    if not any(isinstance(m, QuantizedLinear) for m in module.modules()):
        raise ValueError(
            f"{WHO}: no linear layer of {type(module).__name__} is quantised. Give a module that was trained with"
            " QuantizedBase, or the part of it with these layers."
        )
    holder = nn.Sequential(copy.deepcopy(module))
    made: dict[int, nn.Module] = {}
    for parent in list(holder.modules()):
        for name, child in list(parent._modules.items()):
            swap = swap_of(child) if isinstance(child, QuantizedLinear) else None
            if isinstance(child, QuantizedLinear) and swap is not None:
                if id(child) not in made:
                    made[id(child)] = swap.put_back(plain_tensors(child)).train(child.training)
                parent._modules[name] = made[id(child)]
    for m in holder.modules():
        if APPLIED in m.__dict__:
            m.__dict__[APPLIED] = [record for record in m.__dict__[APPLIED] if record.technique != "QuantizedBase"]
    return cast(M, holder[0])
