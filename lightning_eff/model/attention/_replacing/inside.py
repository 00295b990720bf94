"""Modules whose own forward pass attends otherwise, with parameters for it; and which modules attend, found by one pass."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._attention.calls import Call, CannotReplace
from lightning_eff._core._attention.mode import Replacing
from lightning_eff._core._branches.probing import aside, attempts
from lightning_eff._core.patches import hook_before, hook_behind


class Inside(nn.Module):
    """What a class of modules is made to have: other attention within its forward pass.

    Attributes:
        who: the technique's name.
    """

    who: str

    def attends(self, call: Call) -> Tensor:
        """What a call of attention returns."""
        raise NotImplementedError

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with Replacing(self.attends, self.who):
            return super().forward(*args, **kwargs)

    @override
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return blank, type(self).__bases__, self.__dict__


@functools.cache
def _class_of(kind: type[Inside], cls: type[nn.Module]) -> type[Inside]:
    return cast("type[Inside]", type(f"{kind.__name__}{cls.__name__}", (kind, cls), {"__module__": __name__}))


def blank(kind: type[Inside], cls: type[nn.Module]) -> Inside:
    """An instance without any state."""
    made = _class_of(kind, cls)
    return made.__new__(made)


def put_inside(kind: type[Inside], plain: nn.Module, *, who: str, **attributes: Any) -> Inside:
    """A module with ``plain``'s own class, parameters and settings, and what ``kind`` makes of its attention.

    Args:
        kind: the other attention, to which parameters are still to be given.
        plain: the module, whose forward pass attends.
        who: the technique's name.
        attributes: plain ones that it shall have.
    """
    made = blank(kind, type(plain))
    made.__dict__.update({k: copy.copy(v) if isinstance(v, dict | set) else v for k, v in plain.__dict__.items()})
    made.__dict__.update(who=who, **attributes)
    if isinstance(plain, nn.MultiheadAttention):  # torch's encoder layer reads its weights, unless there are hooks
        made.register_forward_pre_hook(_called)
    return made


def _called(module: nn.Module, args: Any) -> None:
    """Lets the module be called."""


@dataclass
class Place:
    """A module that attends once in a pass.

    Attributes:
        call: what it is given.
        of: what was run on what, in words.
    """

    call: Call
    of: str

    @property
    def heads(self) -> int:
        """Of queries."""
        return self.call.query.shape[1]

    @property
    def width(self) -> int:
        """Features of a head's queries."""
        return self.call.query.shape[-1]

    @property
    def tokens(self) -> int:
        """Keys."""
        return self.call.key.shape[-2]


@contextmanager
def _noting(module: nn.Module, who: str) -> Iterator[list[tuple[str, Call]]]:
    """What attends meanwhile, with the path of the innermost module that runs."""
    stack, handles, found = list[str](), list[Any](), list[tuple[str, Call]]()

    def entering(path: str) -> Callable[..., None]:
        return lambda m, args: stack.append(path)

    def note(call: Call) -> Tensor:
        found.append((stack[-1] if stack else "", call))
        return call.run()

    try:
        for path, m in module.named_modules():
            handles.append(hook_before(m, entering(path), prepend=True))
            handles.append(hook_behind(m, lambda m, args, output: stack.pop() and None, always_call=True))
        with Replacing(note, who):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def places(surgeon: Surgeon, *, who: str, unfit: Callable[[Call], str | None]) -> Mapping[str, Place]:
    """The modules that attend, by path, as the first pass that shows some finds them.

    Args:
        surgeon: of the technique; the batch that it has, or else inputs that are made up, are run on.
        who: the technique's name.
        unfit: why a call cannot be replaced, or None.

    Raises:
        ValueError: if nothing attends, with what was run; if a module attends several times in a pass or in the root's own
            forward; if a call is unfit.
    """
    root, tried = surgeon.root, list[str]()
    for of, run in attempts(root, surgeon.batch):
        try:
            with aside(root), _noting(root, who) as found:
                run()
        except CannotReplace:
            raise
        except Exception as e:  # what is made up may not be what the module takes: the next may be
            tried.append(f"{of} raised {type(e).__name__} ({str(e).splitlines()[0][:120] if str(e) else ''})")
            continue
        if not found:
            tried.append(f"{of} ran, and no attention was seen")
            continue
        for path, call in found:
            why = unfit(call)
            if not path or sum(other == path for other, _ in found) > 1:
                why = "it attends several times in a pass, or in its own forward pass where nothing is to be exchanged"
            if why is not None:
                raise ValueError(
                    f"{who}: the attention of {path or type(root).__name__} cannot be replaced: {why}. Take the technique out."
                )
        rank_zero_info(f"{who}: {len(found)} attentions are replaced, found by {of}.")
        return {path: Place(call, of) for path, call in found}
    ran = [one for one in tried if " ran, " in one]
    raise ValueError(
        f"{who}: found no attention in {type(root).__name__}: {'; '.join((ran or tried)[:2]) or 'there was nothing to run'}."
        " Expected scaled_dot_product_attention, or nn.MultiheadAttention with need_weights=False (of Hugging Face's models"
        " attn_implementation='sdpa'). Give a batch, lightning_eff.apply(module, technique, batch=batch), or take it out."
    )
