"""What :class:`Muon` may be made with."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_eff.optim.optimizers._matrices import Split
from lightning_eff.optim.optimizers._muon.orthogonalization import ITERATIONS

Scheduled = float | Callable[[float], float]

_ADAM: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def spectral_scale(rows: int, columns: int) -> float:
    """``sqrt(max(1, out / in))``: a step of rate ``lr`` changes a map's outputs by about ``lr``, whatever its shape."""
    return math.sqrt(max(1.0, rows / columns))


def match_rms_adamw_scale(rows: int, columns: int) -> float:
    """``0.2 sqrt(max(out, in))``: entries as large as AdamW's steps, whose rate and decay then serve (Liu et al. 2025)."""
    return 0.2 * math.sqrt(max(rows, columns))


SCALES = {"spectral": spectral_scale, "match_rms_adamw": match_rms_adamw_scale}


def check_settings(
    *,
    lr: float,
    weight_decay: Scheduled,
    momentum: Scheduled,
    orthogonalization: str,
    num_iterations: int,
    scale: str,
    normalization: str | None,
    beta2: float,
    split: Split,
    dtype: str | None,
    num_steps: int | None,
) -> None:
    """Raise ``ValueError`` for what :class:`Muon` cannot be made with."""

    def refuse(name: str, got: object, expected: str) -> None:
        raise ValueError(f"Muon({name}={got!r}): expected {expected}.")

    if not 0 <= lr < math.inf:
        refuse("lr", lr, "a finite rate >= 0, such as 0.02")
    if not callable(weight_decay) and not 0 <= weight_decay < math.inf:
        refuse("weight_decay", weight_decay, "a finite number >= 0, or a function of u in [0, 1]")
    if not callable(momentum) and not 0 <= momentum < 1:
        refuse("momentum", momentum, "a number in [0, 1), or a function of u in [0, 1]")
    if orthogonalization not in ITERATIONS:
        refuse("orthogonalization", orthogonalization, f"one of {sorted(ITERATIONS)}")
    if isinstance(num_iterations, bool) or not isinstance(num_iterations, int) or not 1 <= num_iterations < 100:
        refuse("num_iterations", num_iterations, "an integer from 1 to 99; 5 are the usual ones")
    if scale not in SCALES:
        refuse("scale", scale, f"one of {sorted(SCALES)}")
    if normalization not in (None, "neuron"):
        refuse("normalization", normalization, "'neuron' (NorMuon) or None")
    if not 0 <= beta2 < 1:
        refuse("beta2", beta2, "a number in [0, 1)")
    if not (split is None or split == "auto" or isinstance(split, Mapping)):
        refuse("split", split, "'auto', None, or a mapping of patterns of names to parts")
    if dtype not in (None, *DTYPES):
        refuse("dtype", dtype, f"one of {sorted(DTYPES)}, or None")
    if num_steps is not None and (isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1):
        refuse("num_steps", num_steps, "an integer >= 1, or None")


def checked_adam(adam: Mapping[str, Any] | None) -> dict[str, Any]:
    """AdamW's settings for what is no matrix, those that are not given as Jordan et al. have them beside Muon."""
    given = dict(adam or {})
    unknown = sorted(set(given) - set(_ADAM))
    if unknown:
        raise ValueError(f"Muon(adam=...): got {unknown}; expected any of {sorted(_ADAM)}.")
    found = {**_ADAM, **given}
    found["betas"] = tuple(found["betas"])
    if not (found["lr"] >= 0 and found["eps"] >= 0 and found["weight_decay"] >= 0 and len(found["betas"]) == 2):
        raise ValueError(f"Muon(adam={given}): expected lr, eps and weight_decay >= 0 and two betas.")
    if not all(0 <= beta < 1 for beta in found["betas"]):
        raise ValueError(f"Muon(adam={given}): expected betas in [0, 1).")
    return found
