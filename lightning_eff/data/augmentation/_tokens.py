"""Which tensors of a batch are tokens, and which of them stay as they are."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core.batches import lies_at, tensors

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


def check_ids(value: Any, *, who: str, name: str) -> None:
    """Raise ``ValueError`` unless it is the id of a token, a sequence of such, or None."""
    given = [value] if isinstance(value, int) or not isinstance(value, Sequence) or isinstance(value, str) else value
    wrong = [t for t in given if t is not None and (isinstance(t, bool) or not isinstance(t, int) or t < 0)]
    if wrong:
        raise ValueError(f"{who}({name}={wrong[0]!r}): expected an integer >= 0, the id of a token.")


def configs(module: nn.Module) -> list[Any]:
    """The configs of Hugging Face models in the module."""
    return [m.config for m in module.modules() if hasattr(m, "config")]


def configured_special_tokens(module: nn.Module) -> list[int]:
    """The tokens that a Hugging Face config in the module names, ascending."""
    told = [getattr(config, name, None) for config in configs(module) for name in _SPECIAL]
    listed = [t for one in told for t in (one if isinstance(one, list | tuple) else [one])]
    return sorted({t for t in listed if isinstance(t, int)})


def found_tokens(batch: Any, keys: Sequence[str | int] | None, *, who: str) -> list[tuple[str, Tensor]]:
    """The tokens of the batch, with their paths.

    Args:
        batch: tensors in a dict, tuple, list or dataclass.
        keys: names or positions of the tokens; None takes ``input_ids``, or the only tensor (B, T) of integers that is not
            called a mask, a position, a type or a label.
        who: the technique's name, for messages.

    Raises:
        ValueError: if there are none, or it cannot be told which they are; with what was found.
    """
    whole = [(p, t) for p, t in tensors(batch) if not (t.is_floating_point() or t.is_complex()) and t.ndim == 2]
    whole = [(path, t) for path, t in whole if t.dtype != torch.bool]
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
        f"{who}: {told}: {held or 'no tensors'}; expected a tensor (B, T) of integers. Say by keys= which it is, such as"
        " keys=['input_ids'] or keys=[0], or take the technique out."
    )


def attended(ids: Tensor, named: Sequence[tuple[str, Tensor]]) -> Tensor:
    """Which tokens no attention mask among the batch's tensors hides, (B, T), of bool."""
    seen = torch.ones_like(ids, dtype=torch.bool)
    for path, t in named:
        if lies_at(path, "attention_mask") and not lies_at(path, "decoder_attention_mask") and t.shape == ids.shape:
            seen &= t != 0
    return seen
