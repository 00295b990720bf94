"""Where Triton kernels run: compiled on a GPU if there is one, else in Triton's interpreter, which needs none.

Setting TRITON_INTERPRET before triton is imported would do for the interpreter, but lightning has imported triton long
before, and it would hold for all that the process does afterwards. Instead its functions are exchanged for interpreted
ones, and CPU tensors sent to the Triton kernels, while a test runs that asks for ``device``.
"""

import importlib
import sys

import pytest
import torch

from lightning_eff.kernels import _launch

KERNELS = (
    "group_quantization",
    "bit_mask",
    "compressed_norm",
    "compressed_gelu",
    "stochastic_rounding",
    "bf16_adamw",
    "fp8_cast",
    "fp8_matmul",
    "linear_cross_entropy",
    "norm",
    "int8_quantization",
)


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for name in KERNELS:  # before the variable is set: a kernel made under it stays interpreted in all later tests
        importlib.import_module(f"lightning_eff.kernels._{name}_triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(_launch, "uses_triton", lambda x: True)
    ours = [f"lightning_eff.kernels._{name}_triton" for name in KERNELS]
    theirs = [name for name in sys.modules if name == "triton.language" or name.startswith("triton.language.")]
    interpreted: dict[object, InterpretedFunction] = {}
    for module in [sys.modules[name] for name in ours + theirs]:
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                if function.fn not in interpreted:
                    interpreted[function.fn] = InterpretedFunction(function.fn)
                monkeypatch.setattr(module, name, interpreted[function.fn])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the Triton kernels are to be run."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    interpret(monkeypatch)
    return torch.device("cpu")
