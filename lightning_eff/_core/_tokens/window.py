"""The interface for training steps that run blocks of a stack on fewer tokens.

Each block gets the chosen tokens with the masks and positions that belong to them, and returns all tokens. The other tokens
stay bit-for-bit the same. The module's code between blocks always sees all tokens. To run a range of blocks on the same
tokens, make the same choice at each of them.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Generator, Tensor, nn

from lightning_eff._core._tokens.checking import CannotTake, TooFewTokens, find_plan
from lightning_eff._core._tokens.inputs import (
    Call,
    Kept,
    Path,
    Plan,
    given_back,
    is_cache,
    leaves,
    put_tokens,
    tables_at,
)
from lightning_eff._core.batches import num_samples
from lightning_eff._core.blocks import BlockStack, hidden_of, refuse_compiled_around, split_output
from lightning_eff._core.losses import loss_of
from lightning_eff._core.patches import Patches, unwrapped
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step


@dataclass(frozen=True)
class At:
    """The place at which tokens are chosen.

    Attributes:
        block: the index of the block in its stack.
        hidden: its input hidden state, (B, T, D), with its graph.
        step: the current step.
        seed: returns a generator for the run, this rank, this micro-batch and this block. It is the same when gradient
            checkpointing or a two-pass technique runs the block again.
    """

    block: int
    hidden: Tensor
    step: Step
    seed: Callable[[], Generator]

    def generator(self) -> Generator:
        """Return a CPU generator for random draws at this block in this micro-batch."""
        return self.seed()


Choose = Callable[[At], Kept | None]
_Key = tuple[Any, ...]


class Tokens:
    """Blocks of a stack that training steps run on the tokens that ``choose`` selects.

    A technique creates one in ``attach``, finds the blocks in ``on_model``, and uses it in a link of stage ``TRANSFORM``::

        def attach(self, session):
            self._tokens = Tokens(session, type(self).__name__, self._choose, first=1, stop=-1)
            session.chain.add(Stage.TRANSFORM, self._tokens.link)

        def on_model(self, session):
            if session.fitting:
                self._tokens.find(self.layers)

        def _choose(self, at):
            return Kept(torch.randperm(at.hidden.shape[1], generator=at.generator())[:32])

    A forward pass of the first batch without a trace tests each block on a copy (see
    :mod:`~lightning_eff._core._tokens.checking`). A block that cannot run on fewer tokens is refused there. A later batch that
    calls a block with other kinds of inputs (a mask that was not there), or with longer sequences, is tested before the block
    runs. Validation, test and prediction are not affected.

    Args:
        session: the run.
        who: the technique's name, for messages and random numbers.
        choose: selects a block's tokens; None runs it plainly. It must depend only on ``At``, because blocks may be
            recomputed in the backward pass.
        first: the first of the blocks, as in a slice: negative ones count from the end.
        stop: the block after the last; None for the end.
        per_sample: whether the samples' tokens differ: ``Kept.index`` is (B, k).
        alike: how a user can select the same tokens for all samples, for the message if blocks support only that.
        also: a further check with the first batch, after its blocks were tested. A ``ValueError`` that it raises on one rank
            is raised on all.
    """

    _attribute = "forward"  # the patched attribute of a block, which recomputation calls too
    _own_tables = True  # whether a block's buffers may be shortened

    def __init__(
        self,
        session: Session,
        who: str,
        choose: Choose,
        *,
        first: int = 0,
        stop: int | None = None,
        per_sample: bool = False,
        alike: str = "take RandomLTD instead",
        also: Callable[[Step, Any], None] | None = None,
    ) -> None:
        self.session = session
        self.who = who
        self.choose = choose
        self.first, self.stop = first, stop
        self.per_sample = per_sample
        self.alike = alike
        self.also = also
        self._stack: BlockStack | None = None
        # the length and the plan by block and kinds of inputs
        self._plans: dict[tuple[int, _Key], tuple[int, Plan]] = {}
        self._checked = False
        self._looking = False
        self._ran = False
        self._patches: Patches | None = None

    @property
    def stack(self) -> BlockStack:
        """The stack found by :meth:`find`."""
        assert self._stack is not None, "find has found the blocks"
        return self._stack

    @property
    def blocks(self) -> dict[int, nn.Module]:
        """The blocks that run on fewer tokens, by their index in the stack."""
        stack = self.stack
        return {i: stack.blocks[i] for i in range(len(stack.blocks))[self.first : self.stop]}

    @property
    def longest(self) -> int:
        """The largest number of tokens per sample with which a block was tested."""
        return max((longest for longest, _ in self._plans.values()), default=0)

    def find(self, layers: str | Sequence[str] | None) -> BlockStack:
        """Find the stack at the dotted path ``layers``, or the longest one. Call it in ``on_model``.

        Raises:
            ValueError: if there is none, if the range contains no block, or if the stack is compiled together with its
                surroundings.
        """
        self._stack = self.session.stack(layers, who=self.who)
        refuse_compiled_around(self.session.module, self._stack.path, who=self.who)
        if not self.blocks:
            raise ValueError(
                f"{self.who}: the range [{self.first}:{'' if self.stop is None else self.stop}] contains no block of"
                f" {self._stack}; expected at least one."
            )
        return self._stack

    def link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Run :meth:`run` as a link."""
        return self.run(step, batch, proceed)

    def run(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Run ``proceed(batch)`` with the blocks on the chosen tokens, including its backward pass.

        Raises:
            ValueError: on all ranks, if a block cannot run on fewer tokens, with its inputs and the reason.
        """
        if not self._checked and self._running():  # other techniques may skip all blocks in the first steps
            self._look(step, batch)
        if self._patches is not None:  # within another technique's pass, before its backward pass
            return proceed(batch)
        self._put_on(step)
        try:
            output = proceed(batch)
        except (RuntimeError, IndexError, TypeError) as error:
            self._take_off()
            if self._ran or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"{self.who}: training_step ran on all tokens, but fails with fewer of them in the blocks"
                f" {list(self.blocks)} of {self.stack}: {error}. Code outside the blocks expects all tokens, such as a"
                " router's loss. Disable it, or remove the technique."
            ) from error
        except BaseException:
            self._take_off()
            raise
        self._ran |= loss_of(output) is not None
        if torch.is_grad_enabled():
            self.session.when_step_ends(self._take_off)
        else:
            self._take_off()
        return output

    def _look(self, step: Step, batch: Any) -> None:
        problem: ValueError | None = None
        ready = True  # whether the step returns a loss or calls the blocks

        def around(run: Proceed, batch: Any) -> Any:
            self._put_on(step)
            try:
                return run(batch)
            finally:
                self._take_off()

        self._looking = True
        try:
            output = step.forward_only(batch, num_samples(batch), around, transform=False)
            ready = loss_of(output) is not None
            if ready and not self._plans:
                raise ValueError(
                    f"{self.who}: training_step called none of the blocks {list(self.blocks)} of {self.stack}; expected"
                    " each step to call them. Name another stack by layers=."
                )
            if ready and self.also is not None:
                self.also(step, batch)
        except ValueError as error:
            problem = error
        finally:
            self._looking = False
        every = self.session.replicas.everyone((None if problem is None else str(problem), ready))
        for rank, (text, _) in enumerate(every):
            if text is not None and problem is None:
                raise ValueError(f"On rank {rank}: {text}")
        if problem is not None:
            raise problem
        if not all(ready for _, ready in every):  # a skipped step shows nothing
            return
        self._checked = True
        rank_zero_info(f"{self.who}: fewer tokens in the blocks {list(self.blocks)} of {self.stack}")

    # -- the blocks of one step

    def _running(self) -> dict[int, nn.Module]:
        """Return those of the blocks that this step runs, each once; other techniques may skip blocks, or grow the stack."""
        running, found = {id(block) for block in self.stack.running()}, {}
        for index, block in self.blocks.items():
            if id(block) in running:
                running.remove(id(block))
                found[index] = block
        return found

    def _put_on(self, step: Step | None) -> None:
        self._patches = Patches()
        for index, block in self._running().items():
            # a compiled block is wrapped outside of its compiled call
            name = self._attribute if block._compiled_call_impl is None else "_compiled_call_impl"
            plain = getattr(block, name)
            if isinstance(plain := unwrapped(plain), Fewer):
                self._take_off()
                raise ValueError(
                    f"{self.who} and {plain.tokens.who} both choose the tokens of block {index} of {self.stack}; expected"
                    " one technique per block. Give them different blocks, or remove one of them."
                )
            self._patches.set(block, name, Fewer(self, step, index, block, plain))

    def _take_off(self) -> None:
        if self._patches is not None:
            self._patches.restore()
            self._patches = None

    def call(self, fewer: "Fewer", call: Call) -> Any:
        """Return the block's output for ``call``, with only the chosen tokens changed."""
        if self._looking:
            self._plan(fewer, call)
            return fewer.plain(*call[0], **call[1])
        hidden = hidden_of(*call)
        plan = self._plan(fewer, call)
        choice, place = self._chosen(fewer, hidden, plan)
        if choice is None:
            return fewer.plain(*call[0], **call[1])
        less = plan.fewer(call, place)
        with tables_at(fewer.block, plan.tables, place):
            new, rest = split_output(fewer.plain(*less[0], **less[1]))
        full = put_tokens(hidden, place, new, plan.dim)
        return full if rest is None else (full, *given_back(rest, less, call))

    def _chosen(self, fewer: "Fewer", hidden: Tensor, plan: Plan) -> tuple[Kept | None, Tensor]:
        """Return the choice for a block, and the ascending positions of its tokens, on the block's device."""
        in_order = hidden if plan.dim == 1 else hidden.transpose(0, 1)
        index, step = fewer.index, fewer.step
        assert step is not None, "tokens are chosen in training steps only"

        def seed() -> Generator:
            session = self.session
            return session.generator(self.who, step.global_step, step.batch_idx, index, session.rank)

        choice = self.choose(At(index, in_order, step, seed))
        if choice is None:
            return None, torch.empty(0)
        self._check_choice(choice.index, in_order)
        return choice, choice.index.sort(dim=-1).values.to(hidden.device, non_blocking=True)

    def _check_choice(self, place: Tensor, hidden: Tensor) -> None:
        size, tokens = hidden.shape[:2]
        right = place.shape == (size, place.shape[-1]) if self.per_sample else place.ndim == 1
        if not right or not 0 < place.shape[-1] <= tokens:
            raise ValueError(
                f"{self.who}: got a choice of the shape {tuple(place.shape)} for {size} samples of {tokens} tokens; expected"
                f" {f'({size}, k)' if self.per_sample else '(k,)'} with k in 1 .. {tokens}"
                f"{'' if self.per_sample else ', because Tokens has per_sample=False'}."
            )

    def _plan(self, fewer: "Fewer", call: Call) -> Plan:
        """Return how the block gets fewer tokens: the known plan for inputs of these kinds, or one tested now."""
        hidden = hidden_of(*call)
        tokens = max(hidden.shape[:2]) if hidden.ndim == 3 else 0
        key = (fewer.index, kinds(call, hidden))
        longest, plan = self._plans.get(key, (0, None))
        if plan is not None and hidden.shape[plan.dim] <= longest:
            return plan
        # other links may split samples; without a step, only (B, T, D) is taken
        size = hidden.shape[0] if fewer.step is None else num_samples(fewer.step.given)

        def find(*, per_sample: bool) -> Plan:
            generator = self.session.generator(self.who, "trial", fewer.index)
            tables = self._own_tables
            return find_plan(fewer.block, call, size, per_sample=per_sample, generator=generator, tables=tables)

        try:
            found = find(per_sample=self.per_sample)
        except CannotTake as error:
            if isinstance(error, TooFewTokens) and not self._looking:
                raise
            alike = ""
            if self.per_sample:
                with suppress(CannotTake):
                    find(per_sample=False)
                    alike = f" It supports the same tokens for all samples: {self.alike}. Or"
            raise ValueError(
                f"{self.who}: block {fewer.index} of {self.stack} cannot be given fewer of its tokens: {error}.{alike}"
                f" {'take' if alike else 'Take'} other blocks (the range, or another stack by layers=), or remove the"
                " technique."
            ) from None
        self._plans[key] = (max(longest, hidden.shape[found.dim], min(tokens, longest)), found)
        return found


class Fewer:
    """Replaces a block's ``forward`` in a step."""

    def __init__(
        self, tokens: Tokens, step: Step | None, index: int, block: nn.Module, plain: Callable[..., Any]
    ) -> None:
        self.tokens, self.step, self.index, self.block, self.plain = tokens, step, index, block, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.tokens.call(self, (args, kwargs))
        except TooFewTokens:  # in a later batch
            return self.plain(*args, **kwargs)


def kinds(call: Call, hidden: Tensor) -> _Key:
    """Return the kinds of a call's inputs, without their lengths."""
    size, tokens = hidden.shape[0], hidden.shape[1] if hidden.ndim > 1 else 0

    def kind(value: Any) -> Any:
        if is_cache(value) or value is None:
            return None
        if not isinstance(value, Tensor):
            return type(value).__name__
        return value.dtype, tuple(
            "1" if n == 1 else "T" if n == tokens else "B" if n == size else "" for n in value.shape
        )

    found: list[tuple[Path, Any]] = [(path, kind(value)) for path, value in leaves(call)]
    return tuple(item for item in found if item[1] is not None)
