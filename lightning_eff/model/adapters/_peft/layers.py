"""peft's layers, with the way back that ``lightning_eff.export`` asks for."""

import copy
from collections.abc import Mapping
from typing import Any, cast

from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

#: What peft calls an adapter that nobody named.
NAME = "default"


class LoRALinear(Linear):
    """peft's linear map with low-rank factors beside it: ``W x + b + s B A x``.

    Attributes:
        lightning_eff_init: what peft's config says of the first factors.
    """

    lightning_eff_init: Any

    def fold(self) -> Mapping[str, Tensor]:
        """``W + s B A``, or DoRA's rescaled sum, by peft's own merge; and the bias itself."""
        merged = copy.deepcopy(self)
        merged.merge(safe_merge=True)
        return kept(self.get_base_layer(), merged.get_base_layer())


def kept(base: Any, merged: Any) -> dict[str, Tensor]:
    """The merged weight, and the bias that the map has."""
    found = {"weight": cast(Tensor, merged.weight)}
    return found if base.bias is None else {**found, "bias": base.bias}


def lora_layer(base: nn.Module, config: LoraConfig, *, transposed: bool) -> nn.Module:
    """A map with factors beside it, as peft makes it.

    Args:
        base: the map.
        config: peft's.
        transposed: its weight is (in, out), as GPT-2's.
    """
    own = copy.copy(config)
    own.fan_in_fan_out = transposed
    made = LoRALinear(base, NAME, own, own.r, own.lora_alpha, is_target_conv_1d_layer=transposed)
    made.lightning_eff_init = config.init_lora_weights
    return made
