"""peft's VeRA layers, which share two projections, with the methods that ``lightning_eff.export`` needs."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import VeraConfig
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.vera import Linear
from peft.tuners.vera.model import _kaiming_init
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_eff.model.adapters._peft.layers import NAME, SideOutputs


class VeRALinear(SideOutputs, Linear):
    """peft's linear layer with scaled projections: ``W x + bias + b * B (d * A x)``.

    Attributes:
        lightning_eff_key: the seed of the projections.
    """

    lightning_eff_who = "VeRA"
    lightning_eff_key: int

    @override
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """peft's own; if the vectors were cast, as in true half precision, the projections are cast likewise."""
        made: Any = self  # peft's attributes are None until its layer is made
        d, b = made.vera_lambda_d[NAME], made.vera_lambda_b[NAME]
        shared_a, shared_b = made.vera_A[NAME], made.vera_B[NAME]
        if self.disable_adapters or self.merged or shared_a.dtype == d.dtype:
            return super().forward(x, *args, **kwargs)
        base = self.base_layer(x, *args, **kwargs)
        a = F.linear(made.vera_dropout[NAME](x.to(d.dtype)), shared_a[:, : self.in_features].to(d.dtype))
        return (base + b * F.linear(d * a, shared_b[: self.out_features].to(d.dtype))).to(base.dtype).to(x.dtype)


def projections(rank: int, in_features: int, out_features: int, key: int) -> tuple[BufferDict, BufferDict]:
    """A of (r, K) and B of (N, r), drawn as in peft; checkpoints do not hold them, and all layers share them."""
    generator = torch.Generator(device="cpu").manual_seed(key)
    with torch.device("cpu"):
        a, b = (_kaiming_init(shape, generator=generator) for shape in ((rank, in_features), (out_features, rank)))
    return BufferDict({NAME: a}, persistent=False), BufferDict({NAME: b}, persistent=False)


def vera_layer(
    base: nn.Module, shared: tuple[BufferDict, BufferDict], config: VeraConfig, *, transposed: bool, read: bool
) -> nn.Module:
    """A layer with scaled projections, as peft makes it.

    Args:
        base: the linear layer.
        shared: A and B.
        config: peft's config.
        transposed: whether its weight is (in, out), as in GPT-2.
        read: whether it is inside a layer that may read its weight instead of calling it.
    """
    own = copy.copy(config)
    own.fan_in_fan_out = transposed
    made = VeRALinear(base, *shared, NAME, own, own.r, is_target_conv_1d_layer=transposed)
    made.lightning_eff_key = config.projection_prng_key
    made.lightning_eff_read = read
    return made


def vera_config_of(layers: Mapping[str, Any], modules: Sequence[str]) -> VeraConfig:
    """The config with which peft makes the same layers."""
    first = next(iter(layers.values()))
    return VeraConfig(
        r=first.r[NAME],
        projection_prng_key=first.lightning_eff_key,
        vera_dropout=getattr(first.vera_dropout[NAME], "p", 0.0),
        fan_in_fan_out=bool(first.fan_in_fan_out),
        modules_to_save=list(modules) or None,
        inference_mode=True,
    )


def projections_of(layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """The part of A and B that the largest of these layers reads, by peft's names in a file."""
    first = next(iter(layers.values()))
    a = first.vera_A[NAME][:, : max(m.in_features for m in layers.values())]
    b = first.vera_B[NAME][: max(m.out_features for m in layers.values())]
    return {"base_model.vera_A": a, "base_model.vera_B": b}
