"""A mark in checkpoints of what has no parameters, so that a plain module cannot load them as if it computed the same."""

import struct
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

#: The buffer's name.
MARK = "lightning_eff_mark"


def bits_of(value: float) -> int:
    """A number's 64 bits as an integer, which no change of dtype or mean over weights touches."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


class Marked(nn.Module):
    """A module with a number in its ``state_dict`` that says what it computes; loading another number is an error.

    A subclass calls :meth:`mark` in its constructor.
    """

    lightning_eff_mark: Tensor
    _meant: int
    _told: str

    def mark(self, value: float, told: str, device: torch.device | None = None) -> None:
        """Keep ``value``.

        Args:
            value: what tells it from others.
            told: what it computes, in words, for messages.
            device: of the buffer.
        """
        self._meant, self._told = bits_of(value), told
        self.register_buffer(MARK, torch.tensor(self._meant, dtype=torch.int64, device=device))

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        saved = state_dict.get(f"{prefix}{MARK}")
        if isinstance(saved, Tensor) and not saved.is_meta and int(saved) != self._meant:
            was = struct.unpack("<d", struct.pack("<q", int(saved)))[0]
            raise ValueError(
                f"{type(self).__name__}: the checkpoint's {prefix.rstrip('.') or 'module'} computes something else than"
                f" {self._told} here (its mark is {was:g}). Apply the technique with the settings of the checkpoint's run."
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def device_of(root: nn.Module) -> torch.device | None:
    """Where the first parameter of a module lies."""
    first = next(root.parameters(), None)
    return None if first is None else first.device
