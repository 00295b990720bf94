"""Find the tokens of a batch, and those that never change."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core.batches import lies_at, num_samples, tensors

_SPECIAL = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "cls_token_id",
    "sep_token_id",
    "mask_token_id",
    "decoder_start_token_id",
)
_NO_IDS = re.compile(r"mask|position|type|segment|label|target|index|length", re.IGNORECASE)


def configs(module: nn.Module) -> list[Any]:
    """Return the configs of Hugging Face models in the module."""
    return [m.config for m in module.modules() if hasattr(m, "config")]


def configured_special_tokens(module: nn.Module) -> list[int]:
    """Return the special tokens of the Hugging Face configs in the module, ascending."""
    told = [getattr(config, name, None) for config in configs(module) for name in _SPECIAL]
    listed = [t for one in told for t in (one if isinstance(one, list | tuple) else [one])]
    return sorted({t for t in listed if isinstance(t, int)})


def found_tokens(batch: Any, keys: Sequence[str | int] | None, *, who: str) -> list[tuple[str, Tensor]]:
    """Return the tokens of the batch, with their paths.

    Args:
        batch: tensors in a dict, tuple, list or dataclass.
        keys: names or positions of the tokens. None takes ``input_ids``, or the only integer tensor (B, T) with a row per
            sample whose name is not that of a mask, a position, a type or a label.
        who: the technique's name, for messages.

    Raises:
        ValueError: if there are none, or if several tensors could be the tokens.
    """
    whole = [(p, t) for p, t in tensors(batch) if not (t.is_floating_point() or t.is_complex()) and t.ndim == 2]
    whole = [(path, t) for path, t in whole if t.dtype != torch.bool]
    if keys is None and whole:
        rows = (num_samples(batch), 1)  # one row of packed texts
        whole = [(path, t) for path, t in whole if t.shape[0] in rows]
    if keys is not None:
        found = [(path, t) for path, t in whole if any(lies_at(path, key) for key in keys)]
    else:
        found = [(path, t) for path, t in whole if lies_at(path, "input_ids")]
        found = found or [(path, t) for path, t in whole if not _NO_IDS.search(path)]
    if len(found) == 1 or (found and keys is not None):
        return found
    held = ", ".join(f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in tensors(batch))
    told = "found no tokens in the batch" if not found else "cannot tell which are the tokens in the batch"
    raise ValueError(
        f"{who}: {told}: {held or 'no tensors'}. Name an integer tensor (B, T) with keys=, such as keys=['input_ids'] or"
        f" keys=[0], or remove {who}."
    )


def attended(ids: Tensor, named: Sequence[tuple[str, Tensor]]) -> Tensor:
    """Return which tokens no attention mask of the batch hides, (B, T), bool."""
    seen = torch.ones_like(ids, dtype=torch.bool)
    for path, t in named:
        if lies_at(path, "attention_mask") and not lies_at(path, "decoder_attention_mask") and t.shape == ids.shape:
            seen &= t != 0
    return seen
