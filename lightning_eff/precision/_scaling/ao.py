"""torchao's float8 training (``torchao.float8``, 0.18) for the maps that it takes."""

import importlib.util
from typing import Any

from torch import Tensor, nn

from lightning_eff.precision._linear.maps import LinearMap
from lightning_eff.precision._scaling.products import MULTIPLE


def installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def takes(m: LinearMap) -> bool:
    """Whether torchao's float8 linear map covers ``m``: an ``nn.Linear`` whose sizes are multiples of 16."""
    return not m.transposed and m.in_features % MULTIPLE == 0 and m.out_features % MULTIPLE == 0


class TorchAOLinear:
    """``f(x, weight, bias)`` by the module that torchao puts in the place of an ``nn.Linear``.

    torchao's module stays out of the module tree, and reads its parameters in the map's own registry: names, hooks and
    checkpoints are untouched, and there is nothing to take back.

    Args:
        m: see :func:`takes`.
        scaling: "tensorwise" or "rowwise", amax of the moment, as torchao's recipes of these names, but for gradients in
            E5M2 and scales that are no powers of two, so that the numbers are those of the other backends.
        fast: let the forward product accumulate fast.
    """

    def __init__(self, m: LinearMap, scaling: str, *, fast: bool) -> None:
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
            pad_inner_dim=True,
        )
        assert isinstance(m.module, nn.Linear)
        self._linear: Any = convert_to_float8_training(m.module, config=config)  # of a root module: a new one
        self._linear.__dict__["_parameters"] = m.module._parameters

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._linear(x)
