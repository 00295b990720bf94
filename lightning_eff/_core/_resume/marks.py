"""A mark in the checkpoints of modules without parameters, so that a plain module refuses to load them."""

import struct
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

#: The buffer's name.
MARK = "lightning_eff_mark"


def bits_of(value: float) -> int:
    """A number's 64 bits as an integer, which changes of dtype and averages of weights leave unchanged."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


class Marked(nn.Module):
    """A module with a number in its ``state_dict`` that identifies its function; loading another number is an error.

    A subclass calls :meth:`mark` in its constructor.
    """

    lightning_eff_mark: Tensor
    _meant: int
    _told: str

    def mark(self, value: float, told: str, device: torch.device | None = None) -> None:
        """Keep ``value``.

        Args:
            value: the number that identifies the function.
            told: the function in words, for messages.
            device: the device of the buffer.
        """
        self._meant, self._told = bits_of(value), told
        self.register_buffer(MARK, torch.tensor(self._meant, dtype=torch.int64, device=device))

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        saved = state_dict.get(f"{prefix}{MARK}")
        if isinstance(saved, Tensor) and not saved.is_meta and int(saved) != self._meant:
            was = struct.unpack("<d", struct.pack("<q", int(saved)))[0]
            raise ValueError(
                f"{type(self).__name__}: {prefix.rstrip('.') or 'the module'} of the checkpoint is not {self._told} (its mark"
                f" is {was:g}). Apply the technique with the settings of the checkpoint's run."
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def device_of(root: nn.Module) -> torch.device | None:
    """The device of a module's first parameter, or None."""
    first = next(root.parameters(), None)
    return None if first is None else first.device
