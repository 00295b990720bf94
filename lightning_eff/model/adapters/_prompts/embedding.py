"""A token embedding that puts prompts before its output, if the network around it asks for them."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.derived import Derived, derived

#: The name of the parameter, (k, d).
PROMPTS = "prompts"


class Prompted(Derived):
    """A mixin for a class of embeddings, whose k prompts replace the first k ids of the next call.

    Attributes:
        prompts: the prompts, (k, d).
        waiting: whether the next call has ids (B, k + T), whose first k stand for prompts.
        given: the number of calls with prompts.
        as_before: parameters that mean the same without the prompts, so that a head may share them.
    """

    prefix = "Prompted"

    as_before = ("weight",)
    prompts: nn.Parameter
    waiting: bool
    given: int

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.waiting:
            return super().forward(*args, **kwargs)
        self.waiting = False
        self.given += 1
        ids = cast(Tensor, args[0] if args else kwargs.popitem()[1])
        k = self.prompts.shape[0]
        found = cast(Tensor, super().forward(ids[:, k:]))
        # [P; E(x)], (B, k + T, d)
        return torch.cat([self.prompts.to(found.dtype).expand(len(found), -1, -1), found], dim=1)


def prompted(plain: nn.Embedding, first: Tensor) -> Prompted:
    """An embedding of ``plain``'s class, with its table and settings, and with the initial prompts ``first``, (k, d)."""
    made = derived(Prompted, plain, waiting=False, given=0)
    made.register_parameter(PROMPTS, nn.Parameter(first))
    return made
