"""Modules whose own forward pass uses another attention with its own parameters, and the search for modules that attend."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.derived import Derived, derived
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._attention.calls import Call, CannotReplace
from lightning_eff._core._attention.mode import Replacing
from lightning_eff._core._branches.probing import aside, attempts
from lightning_eff._core.patches import hook_before, hook_behind


class Inside(Derived):
    """Mixed into a module's class: another attention within its forward pass.

    Attributes:
        who: the technique's name.
    """

    who: str

    def attends(self, call: Call) -> Tensor:
        """Return the result of a call of attention."""
        raise NotImplementedError

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with Replacing(self.attends, self.who):
            return super().forward(*args, **kwargs)

    def begin(self) -> None:
        """Set the new parameters to their first values."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Reset the class's own parameters, and the new ones."""
        reset = getattr(super(), "reset_parameters", None)
        if reset is not None:
            reset()
        self.begin()


def put_inside(kind: type[Inside], plain: nn.Module, *, who: str, **attributes: Any) -> Inside:
    """Return a module with ``plain``'s class, parameters and settings, and the attention of ``kind``.

    Args:
        kind: the other attention, whose parameters the caller adds.
        plain: the module whose forward pass attends.
        who: the technique's name.
        attributes: further attributes of the module.
    """
    return derived(kind, plain, who=who, **attributes)


@dataclass
class Place:
    """A module that attends once in a pass.

    Attributes:
        call: the call.
        of: which module ran on which input, in words.
    """

    call: Call
    of: str

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.call.query.shape[1]

    @property
    def width(self) -> int:
        """The number of features of a head's queries."""
        return self.call.query.shape[-1]

    @property
    def tokens(self) -> int:
        """The number of keys."""
        return self.call.key.shape[-2]


@contextmanager
def _noting(module: nn.Module, who: str) -> Iterator[list[tuple[str, Call]]]:
    """Record calls of attention, with the path of the innermost module that runs."""
    stack, handles, found = list[str](), list[Any](), list[tuple[str, Call]]()

    def entering(path: str) -> Callable[..., None]:
        return lambda m, args: stack.append(path)

    def leaving(m: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    def note(call: Call) -> Tensor:
        found.append((stack[-1] if stack else "", call))
        return call.run()

    try:
        for path, m in module.named_modules():
            handles.append(hook_before(m, entering(path), prepend=True))
            handles.append(hook_behind(m, leaving, always_call=True))
        with Replacing(note, who):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def places(surgeon: Surgeon, *, who: str, unfit: Callable[[Call], str | None]) -> Mapping[str, Place]:
    """Return the modules that attend, by path, from the first pass that shows some.

    Args:
        surgeon: the technique's surgeon; the pass runs on its batch, or on made-up inputs.
        who: the technique's name.
        unfit: a function that returns why a call cannot be replaced, or None.

    Raises:
        ValueError: if nothing attends, a module attends several times in a pass or in the root's own forward, or a call
            is unfit.
    """
    root, tried = surgeon.root, list[str]()
    for of, run in attempts(root, surgeon.batch):
        try:
            with aside(root), _noting(root, who) as found:
                run()
        except CannotReplace:
            raise
        except Exception as e:  # the module may not take these made-up inputs, but the next ones
            tried.append(f"{of} raised {type(e).__name__} ({str(e).splitlines()[0][:120] if str(e) else ''})")
            continue
        if not found:
            tried.append(f"{of} ran without attention")
            continue
        for path, call in found:
            why = unfit(call)
            if not path or sum(other == path for other, _ in found) > 1:
                why = "it attends several times in a pass, or in the forward of the root, which cannot be replaced"
            if why is not None:
                raise ValueError(
                    f"{who}: the attention of {path or type(root).__name__} cannot be replaced: {why}. Remove {who}."
                )
        return {path: Place(call, of) for path, call in found}
    ran = [one for one in tried if one.endswith(" ran without attention")]
    raise ValueError(
        f"{who}: found no attention in {type(root).__name__}: {'; '.join((ran or tried)[:2]) or 'there was nothing to run'}."
        " Use scaled_dot_product_attention, or nn.MultiheadAttention with need_weights=False (attn_implementation='sdpa' in"
        " Hugging Face's models), or give a batch: lightning_eff.apply(module, technique, batch=batch)."
    )
