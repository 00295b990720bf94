"""Triton kernels, each with a plain PyTorch reference that defines its result.

Each public module has the reference, the choice between implementations, and an autograd Function if there is a backward
pass. A private module of the same name has the Triton kernels and their launchers. Only it imports triton, and it is
imported when a kernel is launched. So everything imports, and runs on a CPU, without triton. Tests and benchmarks compare
the implementations.

The folder is imported as ``lightning_eff.kernels``, because another well-known package is called ``kernels``. Its modules
import only torch and triton.
"""

__all__: list[str] = []
