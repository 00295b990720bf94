"""Blocks of a vision transformer that run on prompts in addition to their tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.derived import Derived, derived
from lightning_eff._core._tokens.inputs import leaves, mapped
from lightning_eff._core._tokens.sequences import sequence_dims
from lightning_eff._core.blocks import hidden_of, split_output

#: The name of the parameter, (k, d).
PROMPTS = "prompts"


class PromptedBlock(Derived):
    """A mixin for a class of blocks that adds prompts after its input tokens, removes them from its output, or both.

    Attributes:
        enter: k, the number of prompts that are added.
        leave: k, the number of tokens that are removed at the end.
        times: the number of copies of each prompt.
    """

    prefix = "Prompted"

    enter: int
    leave: int
    times: int = 1

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.enter:
            args, kwargs = self._with_prompts(args, kwargs)
        output = super().forward(*args, **kwargs)
        if not self.leave:
            return output
        hidden, rest = split_output(output)
        hidden = hidden[:, : hidden.shape[1] - self.times * self.leave]
        return hidden if rest is None else (hidden, *rest)

    @contextmanager
    def twice(self) -> Iterator[None]:
        """Use each prompt twice, as tokens are in the test of whether a block depends on positions."""
        self.times = 2
        try:
            yield
        finally:
            self.times = 1

    def _with_prompts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, prompts = hidden_of(args, kwargs), cast(Tensor, getattr(self, PROMPTS))
        if hidden.ndim != 3 or hidden.shape[-1] != prompts.shape[-1]:
            raise ValueError(
                f"VisualPromptTuning: a {type(self).__bases__[1].__name__} got a hidden state of shape {tuple(hidden.shape)};"
                f" expected tokens (B, T, {prompts.shape[-1]}). Name other blocks with layers=, or remove the callback."
            )
        for path, value in leaves((args, kwargs)):
            if isinstance(value, Tensor) and value is not hidden and _runs_along(value, hidden.shape[1]):
                raise ValueError(
                    f"VisualPromptTuning: a {type(self).__bases__[1].__name__} gets {path[-1]} of shape {tuple(value.shape)}"
                    f" with its {hidden.shape[1]} tokens, such as a mask or rotary table, which has no entries for prompts."
                    " Name other blocks with layers=, or remove the callback."
                )
        # [E; P], (B, T + k, d)
        beside = prompts if self.times == 1 else prompts.repeat_interleave(self.times, dim=0)
        longer = torch.cat([hidden, beside.to(hidden.dtype).expand(len(hidden), -1, -1)], dim=1)
        return mapped((args, kwargs), lambda path, value: longer if value is hidden else value)


def _runs_along(value: Tensor, length: int) -> bool:
    return bool(sequence_dims(value.shape, length)) or (value.ndim > 0 and value.shape[0] in (length, length - 1))


def prompted_block(plain: nn.Module, first: Tensor | None, *, leave: int) -> PromptedBlock:
    """A block of ``plain``'s class, with its parameters and settings.

    Args:
        plain: the block.
        first: initial prompts, (k, d), or None if it adds none.
        leave: the number of tokens to remove from its output.
    """
    made = derived(PromptedBlock, plain, enter=0 if first is None else len(first), leave=leave)
    if first is not None:
        made.register_parameter(PROMPTS, nn.Parameter(first))
    return made
