"""Makes operations that depend on the memory order give the results that they give in plain order."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

#: Memory formats with channels last, by the number of dimensions.
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

_VIEWS = {Tensor.view: Tensor.reshape, Tensor.view_as: Tensor.reshape_as}
_FLATTENING = frozenset(
    (
        *_VIEWS,
        Tensor.reshape,
        Tensor.reshape_as,
        Tensor.flatten,
        Tensor.ravel,
        torch.reshape,
        torch.flatten,
        torch.ravel,
    )
)
_DRAWS = frozenset(
    (
        *(F.dropout, F.alpha_dropout, F.rrelu, torch.dropout, torch.alpha_dropout, torch.rrelu),
        *(torch.bernoulli, Tensor.bernoulli, torch.rand_like, torch.randn_like, torch.randint_like),
    )
)
_DRAWS_IN_PLACE = frozenset(
    (
        *(Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.random_),
        *(torch.dropout_, torch.alpha_dropout_, torch.rrelu_),
    )
)
_SEEING = _FLATTENING | _DRAWS | _DRAWS_IN_PLACE


def lies_last(tensor: Tensor) -> bool:
    """Return whether a tensor (N, C, H, W) or (N, C, D, H, W) is stored channels-last, and so not in plain order."""
    memory_format = FORMATS.get(tensor.ndim)
    return (
        memory_format is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format)
    )


class PlainOrder(TorchFunctionMode):
    """Within it, no operation reveals that images are stored channels-last, except by the time it takes.

    ``Tensor.view``, which fails on tensors in another memory order, copies there. Random numbers, which elements get in
    the order of memory, are drawn in plain order, so the same elements are dropped.

    Attributes:
        copies: the number of tensors copied for this.

    Args:
        who: the technique's name, for messages.
    """

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who
        self.copies = 0
        self._copied: dict[int, tuple[Tensor, Tensor, int]] = {}  # by id: the original, the copy, its version

    def again(self) -> "PlainOrder":
        """Return the mode for a part of the step that is run again."""
        return PlainOrder(self.who)

    @override
    def __exit__(self, *args: Any) -> None:
        self._copied.clear()
        super().__exit__(*args)

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if self._copied and not torch.compiler.is_compiling():
            self._look(args)
        x = args[0] if func in _SEEING and args else None
        if not isinstance(x, Tensor) or x.is_contiguous():
            return func(*args, **given)
        if func in _FLATTENING:
            if isinstance(args[1] if len(args) > 1 else given.get("dtype"), torch.dtype):
                return func(*args, **given)  # the same elements, viewed as another dtype
            made = _VIEWS.get(func, func)(*args, **given)
            self._note(x, made, of_view=func in _VIEWS)
            return made
        if not lies_last(x) or not given.get("training", True) or given.get("p") == 0:  # nothing is drawn or dropped
            return func(*args, **given)
        self.copies += 1
        self._check_runs_once("draws random numbers for each element of an image")
        in_place = func in _DRAWS_IN_PLACE or given.get("inplace", False)
        made = func(
            x.contiguous(), *args[1:], **{**given, **({"inplace": False} if in_place and func in _DRAWS else {})}
        )
        return x.copy_(made) if in_place else made.contiguous(memory_format=FORMATS[x.ndim])

    def _note(self, x: Tensor, made: Tensor, *, of_view: bool) -> None:
        if torch.compiler.is_compiling() or x.untyped_storage().data_ptr() == made.untyped_storage().data_ptr():
            return
        self.copies += 1
        if of_view:
            self._check_runs_once("flattens images by view")
        if torch.is_grad_enabled():
            self._copied[id(x)] = (x, made, made._version)

    def _check_runs_once(self, what: str) -> None:
        """Raise ``ValueError`` in regions that the module checkpoints itself, whose recomputation this mode does not
        reach.
        """
        frame = None if torch.compiler.is_compiling() else sys._getframe()
        while frame is not None:
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                raise ValueError(
                    f"{self.who}: the module {what} within torch.utils.checkpoint, whose recomputation would use the memory"
                    f" order. Let Rematerialization checkpoint instead (not selectively), or remove {self.who}."
                )
            frame = frame.f_back

    def _look(self, args: tuple[Any, ...]) -> None:
        """Raise ``ValueError`` if the module wrote into a copy, which in plain order would have changed the original."""
        for value in args:
            noted = self._copied.get(id(value))
            if noted is not None and noted[1]._version != noted[2]:
                raise ValueError(
                    f"{self.who}: the module writes in place into a flattened {tuple(noted[0].shape)} and then reads the"
                    " original, but with channels last the flattened tensor is a copy. Let it write into the tensor that it"
                    f" reads, or remove {self.who}."
                )
