"""The interface for tokens that are merged from block to block; attention weights each by the number of tokens in it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._tokens.checking import as_in_training
from lightning_eff._core._tokens.inputs import Call, Plan, leaves, mapped, told
from lightning_eff._core._tokens.proportional import Proportional, refuted
from lightning_eff._core._tokens.window import Fewer, Tokens
from lightning_eff._core.blocks import BlockStack, hidden_of, split_output
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step

Merge = Callable[[Tensor], tuple[Tensor, int] | None]


def merged_tokens(hidden: Tensor, sizes: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ``x_g = sum_j s_j x_j / sum_j s_j`` over the tokens j of each group g, and the groups' sizes ``sum_j s_j``.

    Args:
        hidden: x, (B, n, D).
        sizes: s, the number of original tokens in each token, (B, n).
        groups: the group of each token, (B, n), with entries 0 .. ``count`` - 1.
        count: the number of groups.

    Returns:
        (B, count, D) and (B, count). A token that is alone in its group stays bit-for-bit the same.
    """
    totals = sizes.new_zeros(len(sizes), count).scatter_add(1, groups, sizes)
    share = (sizes / totals.gather(1, groups)).unsqueeze(-1).to(hidden.dtype)
    at = groups.unsqueeze(-1).expand_as(hidden)
    return hidden.new_zeros(len(hidden), count, hidden.shape[-1]).scatter_add(1, at, share * hidden), totals


@dataclass
class Held:
    """The state of merged tokens at one block, in one pass over the blocks.

    Attributes:
        given: a fingerprint of the hidden state that the block gets: one number per token, (B, n).
        sizes: the number of the module's tokens in each token that the block gets, (B, n); None for one each.
        places: for each of the module's tokens, the token that contains it, (B, N).
        decided: whether the block has run and decided which tokens it merges.
        groups: the token into which each is merged behind the block's attention, (B, n); None if none are merged.
        count: the number of tokens after that.
    """

    given: Tensor
    sizes: Tensor | None
    places: Tensor
    decided: bool = False
    groups: Tensor | None = None
    count: int = 0

    @property
    def weights(self) -> Tensor:
        """The sizes, (B, n), as numbers."""
        return torch.ones_like(self.given) if self.sizes is None else self.sizes

    def merged(self, hidden: Tensor) -> Tensor:
        """Return a hidden state of the block's tokens after merging, (B, count, D)."""
        return hidden if self.groups is None else merged_tokens(hidden, self.weights, self.groups, self.count)[0]

    def representatives(self, hidden: Tensor) -> Tensor:
        """Return the token of each group, (B, count, D), of a hidden state in which the tokens of a group are equal."""
        if self.groups is None:
            return hidden
        rows = torch.arange(self.groups.shape[1], device=hidden.device).expand_as(self.groups)
        chosen = self.groups.new_zeros(len(hidden), self.count).scatter(1, self.groups, rows)
        return hidden.gather(1, chosen.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))

    def after(self) -> tuple[Tensor | None, Tensor]:
        """Return the sizes and the places of the tokens after merging."""
        if self.groups is None:
            return self.sizes, self.places
        totals = self.given.new_zeros(len(self.given), self.count).scatter_add(1, self.groups, self.weights)
        return totals, self.groups.gather(1, self.places)


class MergingTokens(Tokens):
    """Blocks of a stack that merge tokens between attention and MLP; after the last one each token gets its group's value.

    Attention in a block weights a merged token by the number of tokens in it. Code after the stack sees the full number of
    tokens, and hooks on a block see as many in its output as in its input. A block that is recomputed in the backward pass
    gets the same tokens as before.

    Args:
        session: the run.
        who: the technique's name, for messages.
        merge: takes the keys of the block's attention, (B, n, d). Returns the group of each token, (B, n), numbered
            0 .. count - 1, and the number of groups; None to merge none.
        also: as in ``Tokens``.

    Attributes:
        full: the number of tokens per sample in the module, in the latest pass.
        evaluating: whether an evaluation step runs.
    """

    _own_tables = False  # merged tokens have no position

    def __init__(self, session: Session, who: str, merge: Merge, also: Callable[[Step, Any], None]) -> None:
        super().__init__(session, who, lambda at: None, per_sample=True, also=self._and_order)
        self.merge = merge
        self._then = also
        self._order: list[int] = []  # the blocks of this step, in order
        self._seen: list[int] = []  # the blocks in the order in which the first batch called them
        self._tried: list[Plan] = []  # plans of blocks whose attention was tested with sizes
        self._passes: list[dict[int, Held]] = []  # the passes of this step, each by block
        self.full = 0
        self.evaluating = False
        self._before: Held | None = None  # the state of the block before
        self._full: Tensor | None = None  # a block's output, in which the tokens of a group are equal
        self._now: Held | None = None  # the state of the block that runs

    @override
    def find(self, layers: str | Sequence[str] | None) -> BlockStack:
        stack = super().find(layers)
        if len({id(block) for block in stack.blocks}) < len(stack):
            raise ValueError(
                f"{self.who}: {stack} holds the same block several times; expected different ones, because tokens are merged"
                f" between them. {_OUT}"
            )
        return stack

    @contextmanager
    def in_evaluation(self) -> Iterator[None]:
        """Merge tokens in an evaluation step too. A block that was not tested in a training step is tested now."""
        if self._patches is not None:  # evaluation within a training step
            yield
            return
        self._put_on(None)
        self.evaluating = True
        try:
            with as_in_training():  # torch's fused encoder layers hide their attention
                yield
        finally:
            self.evaluating = False
            self._take_off()

    @override
    def _put_on(self, step: Step | None) -> None:
        super()._put_on(step)
        assert self._patches is not None, "they are on"
        running = self._running()
        self._order, self._seen, self._passes, self._before = list(running), [], [], None
        for index, block in running.items():
            self._patches.set(block, "_call_impl", Merging(self, step, index, block, block._call_impl))

    @override
    def _take_off(self) -> None:
        super()._take_off()
        self._passes, self._before, self._full = [], None, None

    def _and_order(self, step: Step, batch: Any) -> None:
        passes, rest = divmod(len(self._seen), max(len(self._order), 1))
        if rest or self._seen != self._order * max(passes, 1):
            raise ValueError(
                f"{self.who}: training_step calls the blocks {self._seen} of {self.stack}, in this order; expected each of"
                f" {self._order} once per pass, by block(x), because tokens are merged from block to block. {_OUT}"
            )
        self._then(step, batch)

    # -- around a block's hooks, which see as many tokens in the input as in the output

    def enter(self, fewer: Fewer, call: Call) -> Any:
        """Run the block on merged tokens; after the last block, return the module's full number of tokens."""
        if self._looking:
            self._seen.append(fewer.index)
            return fewer.plain(*call[0], **call[1])
        hidden = hidden_of(*call)
        if _again():
            held = self._found(fewer.index, hidden)
        else:
            self._check(fewer, self._on_all(fewer.index, call))
            held = self._next(fewer.index, hidden)
        self._now = held
        try:
            output = fewer.plain(*call[0], **call[1])
        finally:
            self._now = None
        new, rest = split_output(output)
        same, self._full = self._full, None
        if held.groups is not None:  # hooks may have changed the output, and then its groups have a mean
            new = held.representatives(new) if new is same else held.merged(new)
        places = held.after()[1]
        if fewer.index == self._order[-1] and new.shape[1] < self.full:
            new = new.gather(1, places.unsqueeze(-1).expand(-1, -1, new.shape[-1]))
        elif held.groups is None:
            return output
        return new if rest is None else (new, *rest)

    def _on_all(self, index: int, call: Call) -> Call:
        """Return the call on all tokens, to which a plan refers; only the shape of the hidden state matters."""
        hidden = hidden_of(*call)
        if index == self._order[0] or hidden.ndim != 3:
            return call
        every = hidden.narrow(1, 0, 1).expand(-1, self.full, -1)
        return mapped(call, lambda _, value: every if value is hidden else value)

    def _next(self, index: int, hidden: Tensor) -> Held:
        """Return the state at a block that the forward pass has reached."""
        size, tokens = hidden.shape[:2]
        if index == self._order[0]:
            self._passes.append({})
            self.full = tokens
            held = Held(_mark(hidden), None, torch.arange(tokens, device=hidden.device).expand(size, -1))
        else:
            before = self._before
            count = None if before is None else before.count if before.groups is not None else before.given.shape[1]
            if before is None or (len(before.given), count) != (size, tokens):
                raise ValueError(
                    f"{self.who}: block {index} of {self.stack} is called on {tokens} tokens of {size} samples; expected those"
                    f" that the block before it returned{'' if before is None else f', {(len(before.given), count)}'}. {_OUT}"
                )
            held = Held(_mark(hidden), *before.after())
        self._passes[-1][index] = self._before = held
        return held

    # -- inside the hooks: the block's own code

    @override
    def call(self, fewer: Fewer, call: Call) -> Any:
        hidden = hidden_of(*call)
        if self._looking:
            self._check(fewer, call)
            return fewer.plain(*call[0], **call[1])
        held = self._now or self._found(fewer.index, hidden)

        def merge(total: Tensor, keys: Tensor) -> Tensor:
            if not held.decided:
                held.decided = True
                found = self.merge(keys)
                if found is not None:
                    held.groups, held.count = found
            return held.merged(total)

        with Proportional(hidden.shape[0], hidden.shape[1], held.sizes) as attention:
            attention.merge_behind(hidden, merge)
            output = fewer.plain(*call[0], **call[1])
        if attention.keys is not None and attention.waits:
            raise self._refusal(
                fewer,
                "it did not add the result of its attention to its input as when it was tested, so there was no place to merge",
            )
        if attention.runs_again and not _again():
            raise self._refusal(
                fewer,
                "its own code checkpoints its attention (transformers' activation_checkpointing_enable does, or torch's"
                " checkpoint within forward), which would be recomputed without the sizes of merged tokens. Use"
                " Rematerialization instead, which recomputes whole blocks",
            )
        if held.groups is None:
            return output
        small, rest = split_output(output)
        full = small.gather(1, held.groups.unsqueeze(-1).expand(-1, -1, small.shape[-1]))
        self._full = full
        return full if rest is None else (full, *rest)

    def _found(self, index: int, hidden: Tensor) -> Held:
        """Return the state of these tokens in the forward pass, for a block that is recomputed."""
        every = [held[index] for held in self._passes if index in held]
        suits = [held for held in every if held.given.shape == hidden.shape[:2]]
        if not suits:
            raise RuntimeError(
                f"{self.who}: block {index} of {self.stack} runs again on {tuple(hidden.shape[:2])} tokens; expected those of"
                f" the forward pass, {', '.join(str(tuple(held.given.shape)) for held in every) or 'none'}. {_OUT}"
            )
        if len(suits) == 1:
            return suits[0]
        mark = _mark(hidden)  # several passes precede one backward pass, such as those of two views
        return min(suits, key=lambda held: float((held.given - mark).abs().sum()))

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
            reason = f"its arguments include {', '.join(beside)}, and merged tokens have no position, mask or table"
        else:
            reason = refuted(fewer.block, call, self.session.generator(self.who, "sizes", fewer.index))
        if reason is not None:
            raise self._refusal(fewer, reason)
        self._tried.append(plan)

    def _refusal(self, fewer: Fewer, reason: str) -> ValueError:
        return ValueError(f"{self.who}: block {fewer.index} of {self.stack} cannot merge tokens: {reason}. {_OUT}")


class Merging(Fewer):
    """Replaces a block's call, around its hooks."""

    tokens: MergingTokens

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokens.enter(self, (args, kwargs))


def _again() -> bool:
    """Return whether a backward pass is running, which recomputes a block."""
    return torch._C._current_graph_task_id() != -1


def _mark(hidden: Tensor) -> Tensor:
    """Return one number per token, (B, n), by which passes are distinguished."""
    return hidden.detach()[..., 0].to(torch.float32, copy=True)


_OUT = "Name another stack by layers=, or remove the technique."
