"""The interface for tokens that are dropped once: the first block runs on the chosen tokens, and none come back.

The other blocks, and the code after them, get the output for these tokens. The module passes masks, positions and tables for
all tokens to every block, so they are shortened for each.
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
    """Blocks of a stack that run on the tokens that ``choose`` selects at the first one.

    It is used like :class:`~lightning_eff._core._tokens.window.Tokens`. ``choose`` is called at the first block that runs, and
    must return ``Kept`` or None. Code after the stack gets fewer tokens. The technique must check in ``also`` that it supports
    this.

    Attributes:
        on_left: set by a technique. Called with the last running block's output, (B, k, D) with its graph, whenever it ran
            on fewer tokens.
    """

    on_left: Callable[[Tensor], None] | None = None

    _attribute = "_call_impl"  # includes hooks, which need as many tokens in the input as in the output
    _own_tables = False  # recomputation of a block runs inside the patch

    @override
    def _put_on(self, step: Step | None) -> None:
        running = self._running()
        self._entered, self._last = min(running, default=-1), max(running, default=-1)
        # by number of samples: the kept places, the number of all tokens, and their dimension
        self._held: dict[int, tuple[Tensor, int, int]] = {}
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
            # a plan refers to the call on all tokens; only the shape of the hidden state matters
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
    """Return whether a hidden state has this many samples, and the tokens that are kept for them."""
    place, _, dim = held
    return hidden.ndim == 3 and hidden.shape[1 - dim] == size and hidden.shape[dim] == place.shape[-1]
