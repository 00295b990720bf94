"""What launching a Triton kernel needs beside the kernel."""

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor


def uses_triton(x: Tensor) -> bool:
    """Whether work on ``x`` is Triton's, and not plain torch's."""
    return x.is_cuda


def triton_module(name: str) -> ModuleType:
    """The private module of this folder with the Triton kernels called ``name``.

    Raises:
        ImportError: triton is not installed.
    """
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise ImportError(
            "lightning_eff.kernels: cannot import triton, which runs these kernels on CUDA. Builds of torch for CUDA on"
            " Linux include it. Elsewhere keep the tensors on the CPU, or run in a clone of lightning_eff:"
            " pip install -c constraints.txt '.[triton]'"
        ) from error
    return importlib.import_module(f"lightning_eff.kernels._{name}_triton")


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` current where it is a GPU, as Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def num_programs(device: torch.device) -> int:
    """For kernels whose programs loop over rows and keep sums: as many programs as run at once."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
