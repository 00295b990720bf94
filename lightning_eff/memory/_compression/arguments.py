"""The arguments that both forms of compressed activations share, and their check of the module."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count

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


@dataclass(frozen=True, repr=False)
class PowerOfTwo(Count):
    """A power of two between bounds."""

    @property
    @override
    def expected(self) -> str:
        return f"a power of two{self._range()}"

    @override
    def __call__(self, value: Any) -> int:
        number = super().__call__(value)
        if number & (number - 1):
            raise ValueError
        return number


GroupSize = Annotated[int, PowerOfTwo(at_least=16, at_most=8192)]


def check_method(who: str, *, bits: Bits, method: Method) -> None:
    """Check that ``method="mesa"`` has 8 bits.

    Args:
        who: the class's name, for the message.
        bits: the bits per element.
        method: the method.

    Raises:
        ValueError: if the method does not support the bits.
    """
    if method == "mesa" and bits != 8:
        raise ValueError(
            f"{who}({bits=}, {method=}): one running range for a whole head or layer is too wide for less than 8 bits. Set"
            " bits=8, or method='group'."
        )


def check_not_compiled(who: str, module: nn.Module) -> None:
    """Check that no submodule is compiled, because its saved tensors are not those of its operations.

    Raises:
        ValueError: if a submodule is compiled.
    """
    for path, m in module.named_modules():
        if hasattr(m, "_orig_mod") or m.__dict__.get("_compiled_call_impl") is not None:
            raise ValueError(
                f"{who}: {path or type(module).__name__!r} is compiled, so its saved tensors cannot be identified. Remove"
                f" torch.compile, or remove {who} and set torch._functorch.config.activation_memory_budget, which lets"
                " torch.compile recompute."
            )
