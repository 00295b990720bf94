"""peft's layers, with the methods that ``lightning_eff.export`` needs."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

from lightning_eff.model.adapters._peft.reading import unread

#: peft's name of an adapter without a name.
NAME = "default"


class SideOutputs:
    """What all of peft's layers around a base layer share here, before peft's own class.

    Class attributes:
        lightning_eff_who: the technique, for messages.

    Attributes:
        lightning_eff_read: whether it is inside a layer that may read its weight instead of calling it.
    """

    lightning_eff_who: ClassVar[str]
    lightning_eff_read: bool = False
    get_base_layer: Callable[[], Any]

    @property
    def weight(self) -> Tensor:
        """The base layer's weight; one that torch's encoder layers do not read, if it is inside one."""
        weight = cast(Tensor, self.get_base_layer().weight)
        return unread(weight) if self.lightning_eff_read else weight

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: "torch.device | None" = None) -> None:
        """peft's own, except that factors next to a layer on the meta device stay where they are."""
        base = self.get_base_layer()._parameters.get("weight")
        if device is not None or base is None or not base.is_meta:
            cast(Any, super())._move_adapter_to_device_of_base_layer(adapter_name, device)

    def merge(self, safe_merge: bool = False, adapter_names: "list[str] | None" = None) -> None:
        """peft's own, into a weight that is stored.

        Raises:
            ValueError: if the weight is quantised, so that the merged weight would be lost.
        """
        refuse_few_bits(self.lightning_eff_who, self.get_base_layer())
        cast(Any, super()).merge(safe_merge, adapter_names)

    def fold(self) -> Mapping[str, Tensor]:
        """The merged weight, by peft's own merge, and the bias."""
        merged = copy.deepcopy(self)
        merged.merge(safe_merge=True)
        return kept(self.get_base_layer(), merged.get_base_layer())


class LoRALinear(SideOutputs, Linear):
    """peft's linear layer with low-rank factors: ``W x + b + s B A x``, or DoRA's rescaled sum.

    Attributes:
        lightning_eff_init: the initialisation of the factors in peft's config.
    """

    lightning_eff_who = "LoRA"
    lightning_eff_init: Any


def refuse_few_bits(who: str, base: nn.Module) -> None:
    """Raise ``ValueError`` if a layer's weight is not a parameter but computed from codes at each call."""
    if "weight" not in base._parameters:
        raise ValueError(
            f"{who}: the base weight is quantised, and factors cannot be merged into it. Use"
            " lightning_eff.export(lightning_eff.dequantize(module)) to get the merged module."
        )


def kept(base: Any, merged: Any) -> dict[str, Tensor]:
    """The merged weight, and the bias if the layer has one."""
    found = {"weight": cast(Tensor, merged.weight)}
    return found if base.bias is None else {**found, "bias": base.bias}


def lora_layer(base: nn.Module, config: LoraConfig, *, transposed: bool, read: bool) -> nn.Module:
    """A layer with factors, as peft makes it.

    Args:
        base: the linear layer.
        config: peft's config.
        transposed: whether its weight is (in, out), as in GPT-2.
        read: whether it is inside a layer that may read its weight instead of calling it.
    """
    own = copy.copy(config)
    own.fan_in_fan_out = transposed
    made = LoRALinear(base, NAME, own, own.r, own.lora_alpha, is_target_conv_1d_layer=transposed)
    made.lightning_eff_init = config.init_lora_weights
    made.lightning_eff_read = read
    return made


@torch.no_grad()
def draw_lora(layer: LoRALinear) -> None:
    """Give the factors of a layer their initial values, from the random numbers that peft draws for a new layer.

    Peft makes two linear layers, which draw their values, and then draws A again.
    """
    a, b = (layer.get_parameter(f"{factor}.{NAME}.weight") for factor in ("lora_A", "lora_B"))
    a.uniform_()
    b.uniform_()
    bound = math.sqrt(3.0) * (nn.init.calculate_gain("leaky_relu", math.sqrt(5)) / math.sqrt(a.shape[1]))
    a.uniform_(-bound, bound)
    b.zero_()
