"""Triton kernels, each beside the plain PyTorch reference that defines what it computes.

One file per kernel: the reference, the kernel, its launcher, and an autograd Function where it has a backward. Tests
and benchmarks compare the two. The folder is imported as ``lightning_eff.kernels`` (``kernels`` at the top level is
another well-known package's name), and its modules import torch and triton alone. They import triton only where a
kernel is compiled or launched, so that everything imports, and the references work, where triton is not installed.
"""

__all__: list[str] = []
