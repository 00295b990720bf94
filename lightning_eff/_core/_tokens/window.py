"""The way in: blocks of a stack that training steps call on fewer tokens.

Each block is handed the chosen tokens with what belongs to them, and returns all: those that it was not given are bit
for bit as they were. The module's own code between the blocks never sees fewer. A range of blocks on the same tokens is
the same choice at each of them.
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
    """Where a choice of tokens is asked for.

    Attributes:
        block: the index of the block in its stack.
        hidden: the hidden state that it is called with, (B, T, D), with its graph.
        step: the step of the run.
        seed: of the run, this rank, this micro-batch and this block; the same when gradient checkpointing or a technique
            of two passes runs the block again.
    """

    block: int
    hidden: Tensor
    step: Step
    seed: Callable[[], Generator]

    def generator(self) -> Generator:
        """A generator, on the CPU, of what is drawn for this block in this micro-batch."""
        return self.seed()


Choose = Callable[[At], Kept | None]
_Key = tuple[Any, ...]


class Tokens:
    """Blocks of a stack that training steps call on the tokens that ``choose`` says.

    A technique makes one in ``attach``, finds the blocks in ``on_model``, and uses it in a link of stage ``TRANSFORM``::

        def attach(self, session):
            self._tokens = Tokens(session, type(self).__name__, self._choose, first=1, stop=-1)
            session.chain.add(Stage.TRANSFORM, self._tokens.link)

        def on_model(self, session):
            if session.fitting:
                self._tokens.find(self.layers)

        def _choose(self, at):
            return Kept(torch.randperm(at.hidden.shape[1], generator=at.generator())[:32])

    The first batch is looked at in a forward pass without a trace, in which each block is tried on a copy (see
    :mod:`~lightning_eff._core._tokens.checking`): one that cannot be given fewer tokens is refused there. A later batch
    that calls a block with other kinds of inputs (a mask that was not there), or with longer sequences, is looked at in
    its turn, before the block runs. Validation, test and prediction never come by this way.

    Args:
        session: the run.
        who: the technique's name, for messages and random numbers.
        choose: which tokens a block is given; None for all, which is the plain call. It must depend on what ``At`` has
            alone, since blocks may run again in the backward pass.
        first: the first of the blocks, as in a slice: negative ones count from the end.
        stop: the block after the last; None for the end.
        per_sample: the samples' tokens will differ: ``Kept.index`` is (B, k).
        alike: how a user takes the same tokens of all samples instead, for the message where blocks could be given those.
        also: what else is looked at with the first batch, once its blocks have been tried; a ``ValueError`` that it raises
            on one rank is raised on all.
    """

    _attribute = "forward"  # of a block, which is handed its calls, also of those that run it again
    _own_tables = True  # whether buffers of a block may go along

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
        self._plans: dict[
            tuple[int, _Key], tuple[int, Plan]
        ] = {}  # by block and kinds of inputs; and how long they were
        self._checked = False
        self._looking = False
        self._ran = False
        self._patches: Patches | None = None

    @property
    def stack(self) -> BlockStack:
        """The stack that :meth:`find` found."""
        assert self._stack is not None, "find has found the blocks"
        return self._stack

    @property
    def blocks(self) -> dict[int, nn.Module]:
        """The blocks that are given fewer tokens, by their index in the stack."""
        stack = self.stack
        return {i: stack.blocks[i] for i in range(len(stack.blocks))[self.first : self.stop]}

    @property
    def longest(self) -> int:
        """The most tokens of a sample that a block has been tried with."""
        return max((longest for longest, _ in self._plans.values()), default=0)

    def find(self, layers: str | Sequence[str] | None) -> BlockStack:
        """Find the stack at the dotted path ``layers``, or the longest; in ``on_model``.

        Raises:
            ValueError: if there is none, if the range holds no block, or if it is compiled as a whole with what is around.
        """
        self._stack = self.session.stack(layers, who=self.who)
        refuse_compiled_around(self.session.module, self._stack.path, who=self.who)
        if not self.blocks:
            raise ValueError(
                f"{self.who}: of {self._stack} the blocks [{self.first}:{'' if self.stop is None else self.stop}] are"
                " none; expected a range that holds one or more."
            )
        return self._stack

    def link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """A link that does :meth:`run` and nothing else."""
        return self.run(step, batch, proceed)

    def run(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """``proceed(batch)`` with the blocks called on the chosen tokens, in its backward pass too.

        Raises:
            ValueError: on all ranks, if a block cannot be given fewer tokens, with its inputs and the reason.
        """
        if not self._checked and self._running():  # other techniques may let none of them run in the first steps
            self._look(step, batch)
        if self._patches is not None:  # within a pass of another technique, whose backward pass is to come
            return proceed(batch)
        self._put_on(step)
        try:
            output = proceed(batch)
        except (RuntimeError, IndexError, TypeError) as error:
            self._take_off()
            if self._ran or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"{self.who}: training_step, which ran on all tokens, fails with fewer of them in the blocks"
                f" {list(self.blocks)} of {self.stack}: {error}. Something outside of them takes what is inside of them"
                " to be of all tokens, such as a router's loss: switch that off, or take the technique out."
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
        ready = True  # the step returns a loss, or calls the blocks at least

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
        if not all(ready for _, ready in every):  # a step that is skipped tells nothing
            return
        self._checked = True
        rank_zero_info(f"{self.who}: fewer tokens in the blocks {list(self.blocks)} of {self.stack}")

    # -- the blocks of one step

    def _running(self) -> dict[int, nn.Module]:
        """Those of the blocks that this step runs, each once: other techniques may pass over blocks, or grow them."""
        running, found = {id(block) for block in self.stack.running()}, {}
        for index, block in self.blocks.items():
            if id(block) in running:
                running.remove(id(block))
                found[index] = block
        return found

    def _put_on(self, step: Step) -> None:
        self._patches = Patches()
        for index, block in self._running().items():
            name = (
                self._attribute if block._compiled_call_impl is None else "_compiled_call_impl"
            )  # around the compiled
            plain = getattr(block, name)
            if isinstance(plain := unwrapped(plain), Fewer):
                self._take_off()
                raise ValueError(
                    f"{self.who} and {plain.tokens.who} both choose the tokens of block {index} of {self.stack}; expected"
                    " one technique for each block. Give them other blocks, or take one of them out."
                )
            self._patches.set(block, name, Fewer(self, step, index, block, plain))

    def _take_off(self) -> None:
        if self._patches is not None:
            self._patches.restore()
            self._patches = None

    def call(self, fewer: "Fewer", call: Call) -> Any:
        """The block's output for ``call``, with the chosen tokens changed and the others as they were."""
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
        """What is chosen for a block, and the places of the tokens that it gets, ascending, on its device."""
        in_order = hidden if plan.dim == 1 else hidden.transpose(0, 1)
        index, step = fewer.index, fewer.step

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
                f"{'' if self.per_sample else ', since Tokens was made with per_sample=False'}."
            )

    def _plan(self, fewer: "Fewer", call: Call) -> Plan:
        """How the block is given fewer tokens: as found before for inputs of these kinds, or tried now."""
        hidden = hidden_of(*call)
        tokens = max(hidden.shape[:2]) if hidden.ndim == 3 else 0
        key = (fewer.index, kinds(call, hidden))
        longest, plan = self._plans.get(key, (0, None))
        if plan is not None and hidden.shape[plan.dim] <= longest:
            return plan
        size = num_samples(fewer.step.given)  # other links may make several samples of one

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
                    alike = f" It can be given the same tokens of all samples: {self.alike}. Or"
            raise ValueError(
                f"{self.who}: block {fewer.index} of {self.stack} cannot be given fewer of its tokens: {error}.{alike}"
                f" {'take' if alike else 'Take'} other blocks (the range, or another stack by layers=), or take the technique"
                " out."
            ) from None
        self._plans[key] = (max(longest, hidden.shape[found.dim], min(tokens, longest)), found)
        return found


class Fewer:
    """Stands in for a block's ``forward`` in a step."""

    def __init__(self, tokens: Tokens, step: Step, index: int, block: nn.Module, plain: Callable[..., Any]) -> None:
        self.tokens, self.step, self.index, self.block, self.plain = tokens, step, index, block, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.tokens.call(self, (args, kwargs))
        except TooFewTokens:  # of a later batch
            return self.plain(*args, **kwargs)


def kinds(call: Call, hidden: Tensor) -> _Key:
    """What inputs a call has, without their lengths."""
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
