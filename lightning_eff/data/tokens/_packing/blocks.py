"""Blocks of a stack that training steps call on rows of tokens, without padding.

Each block gets the tokens of a padded batch in rows, and returns them in their places. The module's own code before, between
and behind the blocks sees a padded batch, and so do embeddings, heads and losses. At padding, it finds what entered the stack.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._samples.scoring import agree
from lightning_eff._core._tokens.checking import CannotTake
from lightning_eff._core._tokens.inputs import Call, given_back, leaves
from lightning_eff._core._tokens.window import Fewer, Tokens, kinds
from lightning_eff._core.batches import num_samples
from lightning_eff._core.blocks import BlockStack, hidden_of, split_output
from lightning_eff._core.losses import loss_of
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step, in_evaluation
from lightning_eff._core.wrapping import unrounded
from lightning_eff.data.tokens._packing.attention import Attention
from lightning_eff.data.tokens._packing.inputs import Plan, find_plan, sees_padding
from lightning_eff.data.tokens._packing.padding import Padding
from lightning_eff.data.tokens._packing.rows import Rows, in_rows, unpacked


class PackedBlocks(Tokens):
    """Blocks of a stack that training steps call on rows, where these hold fewer slots than the batch has places.

    The first batch with padding is checked before training on it: each block on a copy (see
    :mod:`~lightning_eff.data.tokens._packing.inputs`), and the module's loss, which must be the same with noise at padding,
    and with packing. A later batch is checked before the block runs, if it brings other kinds of inputs, longer rows, the
    first two samples in a row, or tokens that are not the first places. Each step checks that masks still hide padding, and
    that no gradient reaches it.

    Args:
        session: the run.
        who: the technique's name.
        capacity: the largest number of tokens per row; None for the batch's longest sample.
        find: a function that finds how a batch marks its padding.
    """

    def __init__(self, session: Session, who: str, capacity: int | None, find: Callable[[Any], Padding]) -> None:
        super().__init__(session, who, lambda at: None)
        self.capacity = capacity
        self.rows: Rows | None = None  #: the rows of the last batch; None if it was not packed
        self.places = 0  #: the places of the last batch
        self._find_padding = find
        self._padding: Padding | None = None
        self._attention = Attention(who)
        self._noise = False
        self._own_look = False
        self._of_batch: Rows | None = None
        self._one_row: Rows | None = None
        self._given: Any = None
        self._held: dict[Any, tuple[Tensor, Tensor]] = {}
        self._tried: dict[Any, tuple[int, Plan]] = {}
        self._flags: list[tuple[str, Tensor]] = []

    @override
    def find(self, layers: str | Sequence[str] | None) -> BlockStack:
        stack = super().find(layers)
        for index, block in enumerate(stack.blocks):
            for path, m in block.named_modules():
                if m._compiled_call_impl is not None or hasattr(m, "_orig_mod"):
                    raise ValueError(
                        f"{self.who}: block {index} of {stack} is compiled{f' in {path}' if path else ''}, but attention in"
                        f" compiled code cannot be replaced. Remove torch.compile, or {self.who}."
                    )
        return stack

    @override
    def run(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Run ``proceed(batch)`` with the blocks on rows, in its backward pass too.

        Raises:
            ValueError: on all ranks, if a block cannot be packed, or the loss reads padding.
        """
        if not self._checked:
            self._look_first(step, batch)
        if self._patches is not None or not self._own_look:  # within a pass of another technique, or no padding so far
            return proceed(batch)
        self._put_on(step)
        if torch.is_grad_enabled():
            self.session.when_step_ends(self._take_off)
            return self._seen(proceed(batch))
        try:
            return self._seen(proceed(batch))
        finally:
            self._take_off()

    def _seen(self, output: Any) -> Any:
        self._raise_flags()
        return output

    @override
    def _put_on(self, step: Step | None) -> None:
        self._given, self.rows, self._one_row, self.places = None, None, None, 0
        self._held.clear()
        self._flags.clear()
        self._attention.flex.forget()
        super()._put_on(step)

    @override
    def _take_off(self) -> None:
        super()._take_off()
        self._held.clear()
        self._attention.flex.forget()
        self._given = None
        if sys.exc_info()[0] is None:
            self._raise_flags()

    # -- the first batch with padding

    def _look_first(self, step: Step, batch: Any) -> None:
        problem: ValueError | None = None
        try:
            if self._padding is None:
                self._padding = self._find_padding(batch)
            if not self._own_look and self._running():
                self._own_look = self._look_at(step, batch, self._padding)
        except ValueError as error:
            problem = error
        self._checked = all(agree(self.session, problem, self._own_look))

    def _look_at(self, step: Step, batch: Any, padding: Padding) -> bool:
        """Return whether the batch has padding, after checking that it can be packed."""
        keep = padding.keep(batch)
        rows = None if keep is None else in_rows(keep, self.capacity)
        if rows is None:
            return False
        size = num_samples(batch)
        device = next(step.module.parameters()).device.type

        def passed(*, looking: bool = False, noise: bool = False, packing: bool = False) -> float | None:
            def around(run: Proceed, batch: Any) -> Any:
                if not (looking or noise or packing):
                    return run(batch)
                self._looking, self._noise = looking, noise
                self._put_on(step)
                try:
                    return run(batch)
                finally:
                    self._looking = self._noise = False
                    self._take_off()

            loss = loss_of(step.forward_only(batch, size, around, transform=False))
            return None if loss is None or not math.isfinite(float(loss)) else float(loss)

        with in_evaluation([*step.module.modules()]), unrounded():
            if passed(looking=True) is None and not self._tried:  # the step skips this batch
                return False
            if not self._tried:
                raise ValueError(
                    f"{self.who}: training_step called none of the blocks of {self.stack}. Name another stack with layers=."
                )
            plain = passed()
            if plain is None:  # the step skips this batch
                return False
            self._compare(
                plain, passed(noise=True), "with other values at padding, as the blocks return them,", 1e-6, ""
            )
            try:
                packed = passed(packing=True)
            except (RuntimeError, IndexError, TypeError) as error:
                raise ValueError(
                    f"{self.who}: training_step fails with packed rows in the blocks of {self.stack}: {error}. Code outside"
                    f" the blocks expects padded tensors from inside them, such as a router's loss. Disable it, or remove"
                    f" {self.who}."
                ) from error
            exact = all(p.dtype.itemsize >= 4 for p in step.module.parameters()) and not torch.is_autocast_enabled(
                device
            )
            inside = " Code outside the blocks reads more than their output, such as a router's loss. Disable it."
            self._compare(plain, packed, "without padding in the blocks", 2e-5 if exact else 3e-2, inside)
        rank_zero_info(
            f"{self.who}: {self.stack} computes {rows.count} rows of {rows.length} tokens for the"
            f" {rows.keep.numel()} places of the first batch with padding"
        )
        return True

    def _compare(self, plain: float, loss: float | None, what: str, tolerance: float, why: str) -> None:
        if loss is not None and abs(loss - plain) <= tolerance * max(abs(plain), 1e-3):
            return
        why = why or (
            " The loss or an earlier part reads padding (a mean over all places, labels that count at padding, or the first"
            " token after padding on the left, which is predicted at padding). Let it ignore padding."
        )
        raise ValueError(f"{self.who}: {what} the loss is {loss} instead of {plain}.{why} Otherwise remove {self.who}.")

    # -- the blocks of one step

    @override
    def call(self, fewer: Fewer, call: Call) -> Any:
        hidden = hidden_of(*call)
        rows = self._rows(fewer, hidden)
        if rows is None:
            return fewer.plain(*call[0], **call[1])
        plan = self._planned(fewer, call, hidden, rows)
        if self._looking:
            return fewer.plain(*call[0], **call[1])
        if self._noise:
            return self._with_noise(fewer, call, plan, rows)
        rows = self._rows_of(plan, rows)
        self.rows = rows
        self._look_at_masks(call, plan, rows)
        less = plan.in_rows(call, rows, self._held)
        with self._attention.within(fewer.block, rows, plan.mods):
            new, rest = split_output(fewer.plain(*less[0], **less[1]))
        self._look_at_flex(plan)
        full = unpacked(hidden, new, rows, plan.dim, self._watch)
        return full if rest is None else (full, *given_back(rest, less, call))

    def _rows(self, fewer: Fewer, hidden: Tensor) -> Rows | None:
        """Return the rows of the batch that the module's step received last."""
        assert fewer.step is not None, "packing never acts in evaluation"
        batch = fewer.step.given
        if batch is not self._given:
            assert self._padding is not None, "the first batch finds it"
            keep = self._padding.keep(batch)
            self._given, self._one_row = batch, None
            self.places = 0 if keep is None else keep.numel()
            self.rows = self._of_batch = None if keep is None else in_rows(keep, self.capacity)
        return self._of_batch

    def _rows_of(self, plan: Plan, rows: Rows) -> Rows:
        if not plan.one_row:
            return rows
        if self._one_row is None:
            self._one_row = in_rows(rows.keep, rows.keep.numel())
            assert self._one_row is not None, "if rows hold fewer slots than places, so does one row"
        return self._one_row

    def _planned(self, fewer: Fewer, call: Call, hidden: Tensor, rows: Rows) -> Plan:
        """Return how the block is called on rows: as found before for such inputs, or tried now."""
        shared, first = rows.kind
        of_kind = kinds(call, hidden)
        for other in (shared, True):  # a plan for several samples per row also works for one
            longest, plan = self._tried.get((fewer.index, of_kind, other, first), (0, None))
            if plan is None or rows.length > longest:
                continue
            if (hidden.shape[1 - plan.dim], hidden.shape[plan.dim]) == rows.keep.shape:
                return plan
        try:
            generator = self.session.generator(self.who, "trial", fewer.index)
            plan = find_plan(fewer.block, call, rows.keep, self.capacity, self._attention, generator)
        except CannotTake as error:
            raise ValueError(
                f"{self.who}: block {fewer.index} of {self.stack} cannot be called without padding: {error}. Name another stack"
                f" with layers=, another mask with mask=, or remove {self.who}."
            ) from None
        self._tried[fewer.index, of_kind, shared, first] = rows.length, plan
        return plan

    def _with_noise(self, fewer: Fewer, call: Call, plan: Plan, rows: Rows) -> Any:
        hidden, rest = split_output(fewer.plain(*call[0], **call[1]))
        shape = hidden.shape
        generator = self.session.generator(self.who, "noise", fewer.index)
        noise = torch.randn(shape, generator=generator).to(hidden.device, hidden.dtype)
        keep = (rows.keep if plan.dim == 1 else rows.keep.t()).unsqueeze(-1)
        hidden = torch.where(keep, hidden, noise * (1 + hidden.abs().mean()))
        return hidden if rest is None else (hidden, *rest)

    # -- what a later batch could change

    def _look_at_masks(self, call: Call, plan: Plan, rows: Rows) -> None:
        for path, value in leaves(call):
            if path not in plan.hides or (id(value), "hides") in self._held:
                continue
            self._held[id(value), "hides"] = value, value
            seen = sees_padding(value, plan.dims[path], rows, true_hides=plan.true_hides)
            if seen is not None:
                self._flags.append(
                    (f"the mask {'.'.join(map(str, path))} that blocks receive lets tokens see padding", seen)
                )
        if not hidden_of(*call).is_cuda:
            self._raise_flags()

    def _look_at_flex(self, plan: Plan) -> None:
        """Check block masks that blocks did not receive as arguments too."""
        seen, self._attention.flex.seen = self._attention.flex.seen, []
        if plan.flex_hides:
            self._flags += [("FlexAttention's block mask lets tokens see padding", flag) for flag in seen]
        if seen and not seen[0].is_cuda:
            self._raise_flags()

    def _watch(self, gradient: Tensor) -> None:
        """Check for gradients at padding, where a loss that reads it would train something else."""
        if not gradient.is_cuda and not bool(
            gradient.any()
        ):  # the usual case; the following takes several passes over it
            return
        reads = ((gradient != 0) & gradient.isfinite()).any()
        self._flags.append(("the loss reads what the blocks return at padding", reads))
        if not gradient.is_cuda:
            self._raise_flags()

    def _raise_flags(self) -> None:
        flags, self._flags = self._flags, []
        for text, flag in flags:
            if bool(flag):
                raise ValueError(
                    f"{self.who}: in this batch {text}, unlike in the one that was checked. Correct the batch's mask or labels"
                    f" (padding on the left predicts a first token), or remove {self.who}."
                )
