"""Keeping ``torch.compile`` out of what is not the user's: saved-tensor hooks, and passes that are watched.

Dynamo is not imported for it, which costs seconds: where it is not there, nothing is compiled.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def untraced_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> saved_tensors_hooks:
    """``saved_tensors_hooks(pack, unpack)``, neither of which dynamo compiles.

    Autograd calls them from within a compiled block wherever that runs eagerly: at a graph break, or under a mode that
    dynamo does not trace. Dynamo would take them for the block's own code, with a guard on whatever they read, and
    compile them again for each tensor, up to its limit. What is compiled by itself and called in a hook, such as a block
    that runs again, stays compiled.
    """
    if "torch._dynamo" in sys.modules:
        apart: Any = torch.compiler.disable  # its overloads lose the type
        return saved_tensors_hooks(apart(pack), apart(unpack))
    return saved_tensors_hooks(pack, unpack)


def uncompiled() -> AbstractContextManager[None]:
    """In this context what is compiled runs plainly, and is compiled as before afterwards.

    To be set around each run under a ``TorchDispatchMode``: dynamo does not compile there, and would for the rest of the
    process run what it met there plainly.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def compiled_around(module: nn.Module, parts: Iterable[nn.Module]) -> bool:
    """Whether any of ``parts`` lies in a submodule of ``module`` that is compiled as one, or is it."""
    looked_for = {id(part) for part in parts}
    for m in module.modules():
        compiled = type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        if compiled and any(id(part) in looked_for for part in m.modules()):
            return True
    return False
