"""Helpers to launch Triton kernels."""

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor


def uses_triton(x: Tensor) -> bool:
    """Whether Triton, and not plain torch, does the work on ``x``."""
    return x.is_cuda


def triton_module(name: str) -> ModuleType:
    """Import this folder's private module with the Triton kernels called ``name``.

    Raises:
        ImportError: if triton is not installed.
    """
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise ImportError(
            "lightning_eff.kernels: triton is not installed, and these kernels need it on CUDA. Builds of torch for CUDA on"
            " Linux include it. Otherwise keep the tensors on the CPU, or run in a clone of lightning_eff:"
            " pip install -c constraints.txt '.[triton]'"
        ) from error
    return importlib.import_module(f"lightning_eff.kernels._{name}_triton")


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU ``device`` the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def num_programs(device: torch.device) -> int:
    """Return how many programs run at once, for kernels whose programs loop over rows and keep sums."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
