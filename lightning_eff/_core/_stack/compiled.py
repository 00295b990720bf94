"""Keep ``torch.compile`` out of this package's saved-tensor hooks and observation passes.

This module does not import Dynamo, which takes seconds. If Dynamo is not imported, nothing is compiled.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_eff._core._stack.walking import modules_of


def untraced_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> saved_tensors_hooks:
    """Return ``saved_tensors_hooks(pack, unpack)``, neither of which Dynamo compiles.

    Autograd calls them from within a compiled block wherever that runs eagerly: at a graph break, or under a mode that Dynamo
    does not trace. Dynamo would treat them as the block's own code, with guards on the values they read, and recompile them for
    each tensor, up to its limit. Compiled code that a hook calls, such as a recomputed block, stays compiled.
    """
    if "torch._dynamo" in sys.modules:
        apart: Any = torch.compiler.disable  # its overloads lose the function's type
        return saved_tensors_hooks(apart(pack), apart(unpack))
    return saved_tensors_hooks(pack, unpack)


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled code eagerly in this context.

    Use it around each run under a ``TorchDispatchMode``. Dynamo does not compile there, and would then run the same code
    eagerly for the rest of the process.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def compiled_around(module: nn.Module, parts: Iterable[nn.Module]) -> bool:
    """Return whether any of ``parts`` is, or is inside, a compiled submodule of ``module``."""
    looked_for = {id(part) for part in parts}
    for m in modules_of(module):
        compiled = type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        if compiled and any(id(part) in looked_for for part in m.modules()):
            return True
    return False
