"""What the two faces of compressed activations ask of their arguments and of the module."""

from typing import Any, Literal

from torch import nn

Bits = Literal[2, 4, 8, 32, "auto"]
Method = Literal["group", "mesa"]
Level = Literal["L0", "L1", "L2", "L3", "L4"]
LEVELS: dict[str, dict[str, Any]] = {
    "L0": {"bits": 32},
    "L1": {"bits": 4, "convolutions_only": True},
    "L2": {"bits": 4},
    "L3": {"bits": "auto", "budget": 2.0},
    "L4": {"bits": "auto", "budget": 2.0, "offload": True},
}


def check_arguments(who: str, *, bits: object, method: object, group_size: int) -> None:
    """Raise ``ValueError`` for arguments that no compression has.

    Args:
        who: the class's name, for the message.
        bits: 2, 4, 8, 32 or "auto".
        method: "group" or "mesa", which has 8 bits alone.
        group_size: a power of two from 16 to 8192.
    """
    if isinstance(bits, bool) or bits not in (2, 4, 8, 32, "auto"):
        raise ValueError(f"{who}({bits=}): expected 8, 4 or 2 bits, 'auto', or 32 to compress nothing.")
    if method not in ("group", "mesa"):
        raise ValueError(
            f"{who}({method=}): expected 'group', scale and minimum for each group of elements, or 'mesa', running ranges."
        )
    if method == "mesa" and bits != 8:
        raise ValueError(
            f"{who}({bits=}, {method=}): expected bits=8, because one running range for a whole head or layer is too wide"
            " for fewer. Give bits=8, or method='group'."
        )
    if isinstance(group_size, bool) or not 16 <= group_size <= 8192 or group_size & (group_size - 1):
        raise ValueError(f"{who}({group_size=}): expected a power of two from 16 to 8192, such as 256.")


def check_not_compiled(who: str, module: nn.Module) -> None:
    """Raise ``ValueError`` if a submodule is compiled: its saved tensors are not those of the operations in it."""
    for path, m in module.named_modules():
        if hasattr(m, "_orig_mod") or m.__dict__.get("_compiled_call_impl") is not None:
            raise ValueError(
                f"{who}: {path or type(module).__name__!r} is compiled; expected none that is, because a compiled module"
                " chooses itself what to save, and nothing says then what a saved tensor is. Take torch.compile out, or"
                f" take {who} out and let torch.compile recompute"
                " (torch._functorch.config.activation_memory_budget)."
            )
