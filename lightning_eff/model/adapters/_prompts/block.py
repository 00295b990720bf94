"""Blocks of a vision transformer that are run on prompts beside their tokens."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._tokens.inputs import leaves, mapped
from lightning_eff._core._tokens.sequences import sequence_dims
from lightning_eff._core.blocks import hidden_of, split_output

#: The name of the parameter, (k, d).
PROMPTS = "prompts"


class PromptedBlock(nn.Module):
    """What a class of blocks is made to have: prompts behind its tokens as it begins, and none as it ends, or one of the two.

    Attributes:
        enter: k, as many prompts are put in.
        leave: k, as many tokens are taken out at the end.
        times: how often each prompt stands there.
    """

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
        """Each prompt stands twice, as tokens do where it is tried whether a block goes by places."""
        self.times = 2
        try:
            yield
        finally:
            self.times = 1

    def _with_prompts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, prompts = hidden_of(args, kwargs), cast(Tensor, getattr(self, PROMPTS))
        if hidden.ndim != 3 or hidden.shape[-1] != prompts.shape[-1]:
            raise ValueError(
                f"VisualPromptTuning: a block of {type(self).__bases__[1].__name__} was handed a hidden state of the shape"
                f" {tuple(hidden.shape)}; expected tokens (B, T, {prompts.shape[-1]}). Take the technique out."
            )
        for path, value in leaves((args, kwargs)):
            if isinstance(value, Tensor) and value is not hidden and _runs_along(value, hidden.shape[1]):
                raise ValueError(
                    f"VisualPromptTuning: a block of {type(self).__bases__[1].__name__} is handed {path[-1]}"
                    f" {tuple(value.shape)} beside its {hidden.shape[1]} tokens, and what that says of prompts is not known, as"
                    " of masks and rotary tables. Expected blocks of tokens alone. Take the technique out."
                )
        # [E; P], (B, T + k, d)
        beside = prompts if self.times == 1 else prompts.repeat_interleave(self.times, dim=0)
        longer = torch.cat([hidden, beside.to(hidden.dtype).expand(len(hidden), -1, -1)], dim=1)
        return mapped((args, kwargs), lambda path, value: longer if value is hidden else value)

    @override
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, (type(self).__bases__[1],), self.__dict__


def _runs_along(value: Tensor, length: int) -> bool:
    return bool(sequence_dims(value.shape, length)) or (value.ndim > 0 and value.shape[0] in (length, length - 1))


@functools.cache
def _prompted_class(cls: type[nn.Module]) -> type[PromptedBlock]:
    return cast("type[PromptedBlock]", type(f"Prompted{cls.__name__}", (PromptedBlock, cls), {"__module__": __name__}))


def _blank(cls: type[nn.Module]) -> PromptedBlock:
    made = _prompted_class(cls)
    return made.__new__(made)


def prompted_block(plain: nn.Module, first: Tensor | None, *, leave: int) -> PromptedBlock:
    """A block of ``plain``'s own class, parameters and settings.

    Args:
        plain: the block.
        first: prompts at first, (k, d); None where none are put in.
        leave: how many tokens are taken out at its end.
    """
    made = _blank(type(plain))
    made.__dict__.update(plain.__dict__)
    made.__dict__.update(_parameters=dict(plain._parameters), enter=0 if first is None else len(first), leave=leave)
    if first is not None:
        made.register_parameter(PROMPTS, nn.Parameter(first))
    return made
