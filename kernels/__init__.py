"""Triton kernels, each beside the plain PyTorch reference that defines what it computes.

One module for each: the reference, the choice between the ways that compute it, and an autograd Function where it has a
backward. Its Triton kernels and their launchers stand in a private module of the same name, which alone imports triton and is
itself imported where a kernel is launched, so that everything imports, and works on a CPU, where triton is not installed.
Tests and benchmarks compare the ways. The folder is imported as ``lightning_eff.kernels`` (``kernels`` at the top level is
another well-known package's name), and its modules import torch and triton alone.
"""

__all__: list[str] = []
