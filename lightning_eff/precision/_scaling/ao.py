"""torchao's float8 training (``torchao.float8``, 0.18), for the layers that it supports."""

import importlib.util
from typing import Any

from torch import Tensor, nn

from lightning_eff.precision._linear.maps import LinearMap
from lightning_eff.precision._scaling.products import MULTIPLE


def installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def takes(m: LinearMap) -> bool:
    """Return whether torchao's float8 layer supports ``m``: an ``nn.Linear`` with sizes that are multiples of 16."""
    return not m.transposed and m.in_features % MULTIPLE == 0 and m.out_features % MULTIPLE == 0


class TorchAOLinear:
    """``f(x, weight, bias)``, computed by torchao's replacement of an ``nn.Linear``.

    torchao's module stays outside the module tree and reads the parameters of the original layer. Names, hooks and checkpoints
    are unchanged, and nothing has to be undone.

    Args:
        m: a layer that :func:`takes` accepts.
        scaling: "tensorwise" or "rowwise" with dynamic amax, like torchao's recipes of these names. Gradients are E5M2, and
            scales are not powers of two, so the numbers equal those of the other backends.
        fast: whether the forward product accumulates in fewer bits.
        fast_backward: whether the backward products do.
    """

    def __init__(self, m: LinearMap, scaling: str, *, fast: bool, fast_backward: bool = False) -> None:
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            CastConfig,
            Float8GemmConfig,
            Float8LinearConfig,
            ScalingGranularity,
            convert_to_float8_training,
        )

        granularity = ScalingGranularity.TENSORWISE if scaling == "tensorwise" else ScalingGranularity.AXISWISE
        config = Float8LinearConfig(
            cast_config_input=CastConfig(scaling_granularity=granularity),
            cast_config_weight=CastConfig(scaling_granularity=granularity),
            cast_config_grad_output=CastConfig(scaling_granularity=granularity),
            gemm_config_output=Float8GemmConfig(use_fast_accum=fast),
            gemm_config_grad_input=Float8GemmConfig(use_fast_accum=fast_backward),
            gemm_config_grad_weight=Float8GemmConfig(use_fast_accum=fast_backward),
            pad_inner_dim=True,
        )
        assert isinstance(m.module, nn.Linear)
        self._linear: Any = convert_to_float8_training(
            m.module, config=config
        )  # a new module, because m.module is the root
        self._linear.__dict__["_parameters"] = m.module._parameters

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._linear(x)
