"""peft's layers, with the way back that ``lightning_eff.export`` asks for."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

from lightning_eff.model.adapters._reading import unread

#: What peft calls an adapter that nobody named.
NAME = "default"


class Beside:
    """What every layer of peft's that stands beside a base map has here, before peft's own class.

    Class attributes:
        lightning_eff_who: the technique, for messages.

    Attributes:
        lightning_eff_read: it lies in a layer that may read its weight instead of calling it.
    """

    lightning_eff_who: ClassVar[str]
    lightning_eff_read: bool = False
    get_base_layer: Callable[[], Any]

    @property
    def weight(self) -> Tensor:
        """The base's weight; where an encoder layer of torch's may read it, one that it does not read."""
        weight = cast(Tensor, self.get_base_layer().weight)
        return unread(weight) if self.lightning_eff_read else weight

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: "torch.device | None" = None) -> None:
        """peft's own; what stands beside a map without numbers keeps its own."""
        base = self.get_base_layer()._parameters.get("weight")
        if device is not None or base is None or not base.is_meta:
            cast(Any, super())._move_adapter_to_device_of_base_layer(adapter_name, device)

    def merge(self, safe_merge: bool = False, adapter_names: "list[str] | None" = None) -> None:
        """peft's own, into a weight that is stored.

        Raises:
            ValueError: where the weight is kept in few bits, and what is merged into it would be lost.
        """
        refuse_few_bits(self.lightning_eff_who, self.get_base_layer())
        cast(Any, super()).merge(safe_merge, adapter_names)

    def fold(self) -> Mapping[str, Tensor]:
        """The map's weight with what stands beside it, by peft's own merge; and the bias itself."""
        merged = copy.deepcopy(self)
        merged.merge(safe_merge=True)
        return kept(self.get_base_layer(), merged.get_base_layer())


class LoRALinear(Beside, Linear):
    """peft's linear map with low-rank factors beside it: ``W x + b + s B A x``, or DoRA's rescaled sum.

    Attributes:
        lightning_eff_init: what peft's config says of the first factors.
    """

    lightning_eff_who = "LoRA"
    lightning_eff_init: Any


def refuse_few_bits(who: str, base: nn.Module) -> None:
    """Raise ``ValueError`` where a map's weight is no parameter, but made anew of codes at each call."""
    if "weight" not in base._parameters:
        raise ValueError(
            f"{who}: the weight beside these factors is kept in few bits, into which they cannot be merged; expected a plain"
            " one. lightning_eff.export(lightning_eff.dequantize(module)) gives the merged module."
        )


def kept(base: Any, merged: Any) -> dict[str, Tensor]:
    """The merged weight, and the bias that the map has."""
    found = {"weight": cast(Tensor, merged.weight)}
    return found if base.bias is None else {**found, "bias": base.bias}


def lora_layer(base: nn.Module, config: LoraConfig, *, transposed: bool, read: bool) -> nn.Module:
    """A map with factors beside it, as peft makes it.

    Args:
        base: the map.
        config: peft's.
        transposed: its weight is (in, out), as GPT-2's.
        read: it lies in a layer that may read its weight instead of calling it.
    """
    own = copy.copy(config)
    own.fan_in_fan_out = transposed
    made = LoRALinear(base, NAME, own, own.r, own.lora_alpha, is_target_conv_1d_layer=transposed)
    made.lightning_eff_init = config.init_lora_weights
    made.lightning_eff_read = read
    return made
