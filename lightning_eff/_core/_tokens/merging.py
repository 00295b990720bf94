"""The way in for tokens that are merged from block to block, each counting in attention as many times as it stands for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._tokens.inputs import Call, Plan, given_back, leaves, mapped, told
from lightning_eff._core._tokens.proportional import Proportional, refuted
from lightning_eff._core._tokens.window import Fewer, Tokens
from lightning_eff._core.blocks import BlockStack, hidden_of, split_output
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step

Merge = Callable[[Tensor], tuple[Tensor, int] | None]


def merged(hidden: Tensor, sizes: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``x_g = sum_j s_j x_j / sum_j s_j`` over the tokens j of each group g, and the groups' sizes ``sum_j s_j``.

    Args:
        hidden: x, (B, n, D).
        sizes: s, how many tokens each stands for, (B, n).
        groups: the group of each token, (B, n), with entries 0 .. ``count`` - 1.
        count: how many groups there are.

    Returns:
        (B, count, D) and (B, count). A token that is alone in its group is bit for bit as it was.
    """
    totals = sizes.new_zeros(len(sizes), count).scatter_add(1, groups, sizes)
    share = (sizes / totals.gather(1, groups)).unsqueeze(-1).to(hidden.dtype)
    at = groups.unsqueeze(-1).expand_as(hidden)
    return hidden.new_zeros(len(hidden), count, hidden.shape[-1]).scatter_add(1, at, share * hidden), totals


@dataclass(frozen=True)
class Held:
    """What stands for what at one block, in one pass over the blocks.

    Attributes:
        entered: a mark of the hidden state that the module hands over: of each token one number, (B, m).
        given: the same of the one that the block gets, (B, n).
        sizes: how many of the module's tokens each that the block gets stands for, (B, n); None for one each.
        places: for each of the module's tokens that of which it is part, (B, N).
        groups: for each that is handed over that of which it becomes part, (B, m); None where none are merged here.
        weights: how many of the module's tokens each that is handed over stands for, (B, m); None as ``groups``.
    """

    entered: Tensor
    given: Tensor
    sizes: Tensor | None
    places: Tensor
    groups: Tensor | None = None
    weights: Tensor | None = None

    def of(self, hidden: Tensor) -> Tensor:
        """What the block gets of a hidden state that is handed over."""
        if self.groups is None or self.weights is None:
            return hidden
        return merged(hidden, self.weights, self.groups, self.given.shape[1])[0]


class MergingTokens(Tokens):
    """Blocks of a stack between which tokens are merged; after the last each token is what its group has become.

    Attention in a block counts a merged token as many times as it stands for tokens. What comes after the stack sees as many
    tokens as without. A block that runs again in the backward pass does so with the tokens that it had.

    Attributes:
        full: tokens of a sample as the module made them, in the latest pass.

    Args:
        session: the run.
        who: the technique's name, for messages.
        merge: of the keys of the block before, (B, n, d), the group of each token, (B, n), and how many groups there are; None
            to merge none. Groups are told by 0 .. count - 1.
        also: as of ``Tokens``.
    """

    _own_tables = False  # merged tokens have no place

    def __init__(self, session: Session, who: str, merge: Merge, also: Callable[[Step, Any], None]) -> None:
        super().__init__(session, who, lambda at: None, per_sample=True, also=self._and_order)
        self.merge = merge
        self._then = also
        self._order: list[int] = []  # of the blocks in this step
        self._seen: list[int] = []  # as the first batch has called them
        self._tried: list[Plan] = []  # of blocks to whose attention sizes come
        self._passes: list[dict[int, Held]] = []  # of this step, each by its blocks
        self.full = 0
        self._before: tuple[Held, Tensor | None] | None = None  # of the block before, and its keys
        self._now: Held | None = None  # while its block is called

    @override
    def find(self, layers: str | Sequence[str] | None) -> BlockStack:
        stack = super().find(layers)
        if len({id(block) for block in stack.blocks}) < len(stack):
            raise ValueError(
                f"{self.who}: {stack} holds the same block several times; expected different ones, between which tokens are"
                f" merged. {_OUT}"
            )
        return stack

    @override
    def _put_on(self, step: Step) -> None:
        super()._put_on(step)
        assert self._patches is not None, "they are on"
        running = self._running()
        self._order, self._seen, self._passes, self._before = list(running), [], [], None
        for index, block in running.items():
            self._patches.set(block, "_call_impl", Merging(self, step, index, block, block._call_impl))

    @override
    def _take_off(self) -> None:
        super()._take_off()
        self._passes, self._before = [], None

    def _and_order(self, step: Step, batch: Any) -> None:
        passes, rest = divmod(len(self._seen), max(len(self._order), 1))
        if rest or self._seen != self._order * max(passes, 1):
            raise ValueError(
                f"{self.who}: training_step calls the blocks {self._seen} of {self.stack}, in this order; expected each of"
                f" {self._order} once in a pass, by block(x), since tokens are merged from block to block. {_OUT}"
            )
        self._then(step, batch)

    # -- around a block's hooks, to which as many tokens come out as go in

    def enter(self, fewer: Fewer, call: Call) -> Any:
        """The block on merged tokens; after the last each of the module's tokens is what it is part of."""
        if self._looking:
            self._seen.append(fewer.index)
            return fewer.plain(*call[0], **call[1])
        hidden = hidden_of(*call)
        if _again():
            held = self._found(fewer.index, hidden, "entered")
            less = held.of(hidden)
        else:
            self._check(fewer, self._on_all(fewer.index, call))
            held, less = self._next(fewer.index, hidden)
        given = mapped(call, lambda _, value: less if value is hidden else value)
        self._now = held
        try:
            output = fewer.plain(*given[0], **given[1])
        finally:
            self._now = None
        if fewer.index != self._order[-1] or held.sizes is None:
            return output
        new, rest = split_output(output)
        new = new.gather(1, held.places.unsqueeze(-1).expand(-1, -1, new.shape[-1]))
        return new if rest is None else (new, *given_back(rest, given, call))

    def _on_all(self, index: int, call: Call) -> Call:
        """The call as it would be on all tokens, of which a plan is; of the hidden state only its shape counts."""
        hidden = hidden_of(*call)
        if index == self._order[0] or hidden.ndim != 3:
            return call
        every = hidden.narrow(1, 0, 1).expand(-1, self.full, -1)
        return mapped(call, lambda _, value: every if value is hidden else value)

    def _next(self, index: int, hidden: Tensor) -> tuple[Held, Tensor]:
        """What becomes of the tokens that the forward pass hands to a block, and what the block gets."""
        size, tokens = hidden.shape[:2]
        mark = _mark(hidden)
        if index == self._order[0]:
            self._passes.append({})
            self.full = tokens
            places = torch.arange(tokens, device=hidden.device).expand(size, -1)
            held, less = Held(mark, mark, None, places), hidden
        else:
            before, keys = self._before or (None, None)
            if before is None or before.given.shape != (size, tokens):
                raise ValueError(
                    f"{self.who}: block {index} of {self.stack} is called on {tokens} tokens of {size} samples; expected those"
                    f" that the block before it returned{'' if before is None else f', {tuple(before.given.shape)}'}. {_OUT}"
                )
            found = None if keys is None else self.merge(keys)
            if found is None:
                held, less = Held(mark, mark, before.sizes, before.places), hidden
            else:
                groups, count = found
                weights = torch.ones_like(mark) if before.sizes is None else before.sizes
                less, sizes = merged(hidden, weights, groups, count)
                held = Held(mark, _mark(less), sizes, groups.gather(1, before.places), groups, weights)
        self._passes[-1][index] = held
        self._before = held, None
        return held, less

    # -- within them: the block's own code

    @override
    def call(self, fewer: Fewer, call: Call) -> Any:
        hidden = hidden_of(*call)
        if self._looking:
            self._check(fewer, call)
            return fewer.plain(*call[0], **call[1])
        held = self._now or self._found(fewer.index, hidden, "given")
        with Proportional(hidden.shape[0], hidden.shape[1], held.sizes) as attention:
            output = fewer.plain(*call[0], **call[1])
        if not _again():
            if attention.runs_again:
                raise self._refusal(
                    fewer,
                    "its own code checkpoints its attention (transformers' activation_checkpointing_enable does, or torch's"
                    " checkpoint within forward), which would run again without the sizes of merged tokens. Leave that out, and"
                    " use Rematerialization, which runs whole blocks again",
                )
            self._before = held, attention.keys
        return output

    def _found(self, index: int, hidden: Tensor, what: Literal["entered", "given"]) -> Held:
        """What became of these tokens in the forward pass, now that the block runs again."""
        every = [held[index] for held in self._passes if index in held]
        suits = [held for held in every if getattr(held, what).shape == hidden.shape[:2]]
        if not suits:
            raise RuntimeError(
                f"{self.who}: block {index} of {self.stack} runs again on {tuple(hidden.shape[:2])} tokens; expected those of"
                f" the forward pass, {', '.join(str(tuple(getattr(held, what).shape)) for held in every) or 'none'}. {_OUT}"
            )
        if len(suits) == 1:
            return suits[0]
        mark = _mark(hidden)  # there were several passes before one backward pass, such as those of two views
        return min(suits, key=lambda held: float((getattr(held, what) - mark).abs().sum()))

    def _check(self, fewer: Fewer, call: Call) -> None:
        plan = self._plan(fewer, call)
        if any(plan is tried for tried in self._tried):
            return
        inputs = dict(leaves(call))
        beside = [told(path, inputs[path]) for path in plan.dims]
        if fewer.block._compiled_call_impl is not None or hasattr(fewer.block, "_orig_mod"):
            reason = "it is compiled, so its attention cannot be seen. Leave its compilation out"
        elif plan.dim != 1:
            reason = f"its hidden state has the shape {tuple(hidden_of(*call).shape)}; expected (B, T, D)"
        elif beside:
            reason = f"it is handed {', '.join(beside)}, and merged tokens have no place, mask or table of their own"
        else:
            reason = refuted(fewer.block, call, self.session.generator(self.who, "sizes", fewer.index))
        if reason is not None:
            raise self._refusal(fewer, reason)
        self._tried.append(plan)

    def _refusal(self, fewer: Fewer, reason: str) -> ValueError:
        return ValueError(f"{self.who}: block {fewer.index} of {self.stack} cannot merge tokens: {reason}. {_OUT}")


class Merging(Fewer):
    """Stands in for a block's call, around its hooks."""

    tokens: MergingTokens

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokens.enter(self, (args, kwargs))


def _again() -> bool:
    """Whether a backward pass is under way, which runs a block again."""
    return torch._C._current_graph_task_id() != -1


def _mark(hidden: Tensor) -> Tensor:
    """Of each token one number, by which a pass can be told from others, (B, n)."""
    return hidden.detach()[..., 0].to(torch.float32, copy=True)


_OUT = "Name another stack by layers=, or take the technique out."
