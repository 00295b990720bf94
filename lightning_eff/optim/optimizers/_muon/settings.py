"""The settings of :class:`Muon`."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch

from lightning_eff._core._arguments.kinds import Either, Fraction, Function, Number

_OF_PROGRESS = Function("u in [0, 1], the fraction of the run that is over")
#: a number, or a function of the fraction of the run that is over
Decay = Annotated[float | Callable[[float], float], Either(Number(at_least=0), _OF_PROGRESS)]
Momentum = Annotated[float | Callable[[float], float], Either(Fraction(below=1), _OF_PROGRESS)]

_ADAM: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def spectral_scale(rows: int, columns: int) -> float:
    """Return ``sqrt(max(1, out / in))``, with which a step changes a linear layer's outputs by about ``lr``."""
    return math.sqrt(max(1.0, rows / columns))


def match_rms_adamw_scale(rows: int, columns: int) -> float:
    """Return ``0.2 sqrt(max(out, in))``, which fits AdamW's learning rate (Liu et al. 2025)."""
    return 0.2 * math.sqrt(max(rows, columns))


SCALES = {"spectral": spectral_scale, "match_rms_adamw": match_rms_adamw_scale}


def checked_adam(adam: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check AdamW's settings for the other parameters; the defaults are those of Jordan et al. for Muon."""
    given = dict(adam or {})
    unknown = sorted(set(given) - set(_ADAM))
    if unknown:
        raise ValueError(f"Muon(adam=...): there is no setting {unknown[0]!r}. Choose from {sorted(_ADAM)}.")
    found = {**_ADAM, **given}
    found["betas"] = tuple(found["betas"])
    if not (found["lr"] >= 0 and found["eps"] >= 0 and found["weight_decay"] >= 0 and len(found["betas"]) == 2):
        raise ValueError(
            f"Muon(adam={given}): lr, eps and weight_decay must be >= 0, and betas are two numbers. The defaults are {_ADAM}."
        )
    if not all(0 <= beta < 1 for beta in found["betas"]):
        raise ValueError(f"Muon(adam={given}): betas must be in [0, 1). The default is {_ADAM['betas']}.")
    return found
