"""A token embedding that puts prompts before what it looks up, where the network that it is a part of asks for them."""

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

#: The name of the parameter, (k, d).
PROMPTS = "prompts"


class Prompted(nn.Module):
    """What a class of embeddings is made to have: k rows that stand for the first k ids of a call that is awaited.

    Attributes:
        prompts: the rows, (k, d).
        waiting: the next call is on ids (B, k + T), whose first k are none.
        given: how often prompts were put in.
        as_before: the table means by itself what it did, so that a head may have it.
    """

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

    @override
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, (type(self).__bases__[1],), self.__dict__


@functools.cache
def _prompted_class(cls: type[nn.Module]) -> type[Prompted]:
    return cast("type[Prompted]", type(f"Prompted{cls.__name__}", (Prompted, cls), {"__module__": __name__}))


def _blank(cls: type[nn.Module]) -> Prompted:
    made = _prompted_class(cls)
    return made.__new__(made)


def prompted(plain: nn.Embedding, first: Tensor) -> Prompted:
    """An embedding of ``plain``'s own class, table and settings, with prompts that begin at ``first``, (k, d)."""
    made = _blank(type(plain))
    made.__dict__.update(plain.__dict__)
    made.__dict__.update(_parameters=dict(plain._parameters), waiting=False, given=0)
    made.register_parameter(PROMPTS, nn.Parameter(first))
    return made
