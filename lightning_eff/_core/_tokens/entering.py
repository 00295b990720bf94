"""The way in for tokens that are left out once: the first block is called on those that are chosen, and none come back.

The other blocks, and what comes after them, get what the blocks before made of these; masks, positions and tables, which the
module hands to every block for all tokens, are cut for each.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._tokens.inputs import Call, Kept, given_back, mapped
from lightning_eff._core._tokens.window import Fewer, Tokens
from lightning_eff._core.blocks import hidden_of, split_output
from lightning_eff._core.steps import Step


class EnteringTokens(Tokens):
    """Blocks of a stack, the first of which is called on the tokens that ``choose`` says, and all others on the same.

    It is used as :class:`~lightning_eff._core._tokens.window.Tokens` is. ``choose`` is asked at the first block that runs,
    and must return ``Kept`` or None. What comes after the stack sees fewer tokens: whether it can is for the technique to
    find out, in ``also``.

    Attributes:
        on_left: where a technique sets it, called with what the last block that runs made of the tokens, (B, k, D) with its
            graph, each time that it is called on fewer.
    """

    on_left: Callable[[Tensor], None] | None = None

    _attribute = "_call_impl"  # with their hooks, to which input and output must be of as many tokens
    _own_tables = False  # what runs a block again does so within them

    @override
    def _put_on(self, step: Step) -> None:
        running = self._running()
        self._entered, self._last = min(running, default=-1), max(running, default=-1)
        self._held: dict[
            int, tuple[Tensor, int, int]
        ] = {}  # by the samples: the places, of how many tokens, along which dim
        super()._put_on(step)

    @override
    def call(self, fewer: Fewer, call: Call) -> Any:
        if self._looking:
            return super().call(fewer, call)
        hidden = hidden_of(*call)
        if fewer.index == self._entered:
            plan = self._plan(fewer, call)
            choice, place = self._chosen(fewer, hidden, plan)
            size = hidden.shape[1 - plan.dim]
            if choice is None:
                self._held.pop(size, None)
                return fewer.plain(*call[0], **call[1])
            if not isinstance(choice, Kept):
                raise TypeError(f"{self.who}: got a choice of {type(choice).__name__}; expected Kept, or None.")
            dim = plan.dim
            self._held[size] = place, hidden.shape[dim], dim
            less = plan.fewer(call, place)
        else:
            held = next((h for size, h in self._held.items() if _fits(hidden, size, h)), None)
            if held is None:
                return fewer.plain(*call[0], **call[1])
            place, tokens, dim = held
            # the call as it would be on all tokens, of which a plan is; of the hidden state only its shape counts
            shape = [tokens if d == dim else n for d, n in enumerate(hidden.shape)]
            every = hidden.narrow(dim, 0, 1).expand(shape)
            call = mapped(call, lambda _, value: every if value is hidden else value)
            less = self._plan(fewer, call).fewer(call, place, hidden)
        output = fewer.plain(*less[0], **less[1])
        new, rest = split_output(output)
        if fewer.index == self._last and self.on_left is not None:
            self.on_left(new if dim == 1 else new.transpose(0, 1))
        return output if isinstance(output, Tensor) else (new, *given_back(rest or (), less, call))


def _fits(hidden: Tensor, size: int, held: tuple[Tensor, int, int]) -> bool:
    """Whether a hidden state is of so many samples, and of the tokens that are held for them."""
    place, _, dim = held
    return hidden.ndim == 3 and hidden.shape[1 - dim] == size and hidden.shape[dim] == place.shape[-1]
