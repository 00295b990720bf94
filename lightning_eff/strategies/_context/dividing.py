"""Divides the tokens of each sequence over ranks inside a stack of blocks, after trials against the whole module."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from lightning_eff._core.blocks import find_stack, hidden_of, split_output
from lightning_eff._core.patches import hook_before, hook_behind
from lightning_eff.strategies._context.agreeing import Meeting, agreed, described, problem_of
from lightning_eff.strategies._context.arguments import Slot, copied, holds_tensors, mapped
from lightning_eff.strategies._context.inside import Inside, Seen, Site
from lightning_eff.strategies._context.joining import Joining
from lightning_eff.strategies._context.messages import Share, parts_of
from lightning_eff.strategies._side_outputs.places import Before
from lightning_eff.strategies._tensor.exercise import exercised
from lightning_eff.strategies._tensor.trace import Record, execute, jittered, undisturbed
from lightning_eff.strategies._tensor.verify import Finding, compare, noise, rounding, tolerance

_TRIALS = 48  # calls of one block
_NOT_TOKENS = "further tensors without values for each token"
_WAY_OUT = "Set context_parallel_size=1, and use Rematerialization or shard=True for long sequences."


@dataclass(frozen=True)
class Plan:
    """How blocks run on a part of the tokens.

    Attributes:
        dim: the dimension of tokens in the hidden state.
        sliced: the dimension of tokens of each other tensor argument that is divided, by its place.
        shifted: the places in the module's code that read positions from the number of tokens.
        calls: for each call of attention in a block, whether its queries and keys are the divided tokens.
    """

    dim: int
    sliced: dict[Slot, int] = field(default_factory=dict[Slot, int])
    shifted: frozenset[Site] = frozenset()
    calls: tuple[bool, ...] | None = None


@dataclass
class _Call:
    """A call of the first block on the whole sequence, and its hidden states before and after."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entered: Tensor
    left: Tensor | None = None
    rest: Any = None


class Dividing:
    """Context parallelism of the blocks of one module.

    Each rank runs the module's own step on the whole batch. A block gets the hidden state of this rank's tokens only, and
    the module's code after it gets the hidden state of all tokens. So embeddings, positions, labels and the loss stay those
    of whole sequences, and what blocks keep for the backward pass is divided by the number of ranks. Outside of training
    steps, without gradients, and for sequences shorter than two tokens per rank, every rank runs whole blocks.

    Args:
        module: the module.
        layers: the blocks, as ``HybridParallelStrategy``'s argument.
        group: the ranks that share a sequence.
        device: this rank's device.
        who: name of the caller in messages.

    Raises:
        ValueError: if there is no stack of blocks, or it is compiled.

    Attributes:
        active: whether a training step or its backward pass is running.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        layers: Any,
        group: dist.ProcessGroup,
        device: torch.device,
        who: str,
    ) -> None:
        found = find_stack(module, layers, who=who)
        self.module, self.blocks, self.path = module, found.blocks, found.path
        self.group, self.rank, self.size = group, dist.get_rank(group), group.size()
        self.device, self.who = device, f"{who}(context_parallel_size={group.size()})"
        self.active = False
        self.plan: Plan | None = None
        self._seen: Seen | None = None
        self._meeting: Meeting | None = None
        self._running: list[tuple[Inside, Before | None] | None] = []
        self._joining = Joining(module, len(self.blocks), who=self.who)
        self._index = {id(block): i for i, block in enumerate(self.blocks)}
        self._handles: list[RemovableHandle] = []
        if any(m._compiled_call_impl is not None for block in self.blocks for m in block.modules()):
            raise ValueError(
                f"{self.who}: the blocks of {self.path!r} are compiled, and compiled attention cannot be divided. Remove the"
                " call of .compile(), or set context_parallel_size=1."
            )

    # -- in a step

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Divide sequences in this context: a training step, or its backward pass."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Divide sequences in this context, which ends on all ranks if one of them raises."""
        self._meeting = Meeting(self.group, self.device)
        try:
            with self.stepping(), self._meeting:
                yield
        finally:
            self._meeting = None

    def install(self) -> None:
        """Register the hooks of the blocks, around those of others."""
        self.remove()
        for block in dict.fromkeys(self.blocks):
            self._handles += [
                hook_before(block, self._enter, with_kwargs=True, prepend=True),
                hook_behind(block, self._leave, with_kwargs=True, always_call=True),
            ]

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._running.append(None)
        plan = self.plan
        if plan is None or not self.active or not torch.is_grad_enabled():
            return None
        hidden = hidden_of(args, kwargs)
        if hidden.shape[plan.dim] < 2 * self.size:
            return None
        share = Share(self.group, self.rank, parts_of(hidden.shape[plan.dim], self.size), self._meeting)

        def change(slot: Slot, value: Tensor) -> Tensor:
            if value is hidden:
                return share.of(value, plan.dim)
            return share.of(value, plan.sliced[slot]) if slot in plan.sliced else value

        args, kwargs = mapped(args, change), mapped(kwargs, change)
        inside = Inside(share, plan.shifted, plan.calls, self.who, self._seen)
        self._running[-1] = inside, self._joining.entering(self._index[id(block)])
        inside.__enter__()
        return args, kwargs

    def _leave(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        running = self._running.pop() if self._running else None
        if running is None:
            return None
        inside, before = running
        inside.__exit__(None, None, None)
        if output is None:  # the block raised
            return None
        hidden, rest = split_output(output)
        assert self.plan is not None
        index, share = self._index[id(block)], inside.share
        if hidden.shape[self.plan.dim] != share.length:
            raise ValueError(self._other(f"a hidden state of shape {tuple(hidden.shape)}"))
        others = self._joining.joined(index, before, hidden, rest or (), share, self.plan.dim)
        if any(holds_tensors(item) for i, item in enumerate(rest or (), 1) if i not in self._joining.outputs(index)):
            raise ValueError(self._other(_NOT_TOKENS))
        hidden = share.gathered(hidden, self.plan.dim)
        return hidden if rest is None else type(output)((hidden, *others))

    def _other(self, what: str) -> str:
        return (
            f"{self.who}: a block of {self.path!r} returned {what}, but each rank has only a part of the tokens. Let blocks"
            " return a hidden state with as many tokens as they got, and beside it only smaller tensors with values for each"
            " token, such as a router's logits (in Hugging Face models: output_attentions=False), or set"
            " context_parallel_size=1."
        )

    # -- at setup

    def learn(self, run: Callable[[], Tensor] | None) -> None:
        """Find how blocks run on a part of the tokens, and check a step's loss and gradients; collective over the ranks.

        Args:
            run: runs the module's training step on one batch, and returns the loss; None without weights.

        Raises:
            ValueError: on all ranks, if the divided module differs from the whole one, or cannot be compared with it.
        """
        if run is None:
            raise ValueError(
                f"{self.who}: the module has no weights yet, so that its division cannot be checked. Set init_on='all', or"
                " context_parallel_size=1."
            )
        first = agreed(lambda: execute(self.module, run, keep_calls=True), self.group, who=self.who)
        with exercised(self.module, first):
            before, call = agreed(lambda: self._whole(run), self.group, who=self.who)
            with jittered(self.module, rounding(before.dtype, self.device.type)):
                errors = noise(before, agreed(lambda: execute(self.module, run), self.group, who=self.who))
            self.install()
            try:
                self._search(call, tolerance(before.dtype, self.device.type))
                after = self._mean(run)
            finally:
                self._seen = None
                self.remove()
            mesh = DeviceMesh.from_group(self.group, self.device.type)
            finding = after if isinstance(after, Finding) else compare(self.module, before, after, mesh, errors)
        if finding.message:
            apart = self._joining.apart
            why = f" Blocks compute {', '.join(apart[:3])} from the tokens of one rank." if apart else ""
            way_out = (
                "Let blocks leave values for each token instead, such as a router's logits, and compute the loss of them behind"
                " the blocks, or set context_parallel_size=1."
                if apart
                else _WAY_OUT
            )
            raise ValueError(
                f"{self.who}: one block of {self.path!r} is right on a part of the tokens, but in the whole step"
                f" {finding.message}.{why} Typical causes are code that reads values inside the blocks (hooks, a router's"
                f" loss), a checkpoint inside a block (checkpoint whole blocks), or blocks that differ from the first one."
                f" {way_out}"
            )
        plan = self.plan
        assert plan is not None
        given = [".".join(slot) for slot in plan.sliced]
        rank_zero_info(
            f"{self.who}: {len(self.blocks)} blocks of {self.path!r} run on a part of the tokens; divided arguments:"
            f" {', '.join(given) or 'none'}; positions are read at {len(plan.shifted)} places. Checked on one batch."
        )

    def _whole(self, run: Callable[[], Tensor]) -> tuple[Record, _Call]:
        """Run a step on whole sequences, and return its record and the first block's call."""
        found: list[_Call] = []
        before: list[Before | None] = []

        def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            before.append(self._joining.before(self._index[id(block)]))
            if not found and block is self.blocks[0]:
                hidden = hidden_of(args, kwargs)
                args, kwargs = copied(args), copied(kwargs)
                found.append(_Call(args, kwargs, hidden.detach().clone()))

        def leave(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            hidden, rest = split_output(output)
            if found and found[0].left is None and block is self.blocks[0]:
                found[0].left, found[0].rest = hidden.detach().clone(), rest
            self._joining.learn(self._index[id(block)], before.pop(), hidden, rest)

        handles = [
            handle
            for block in dict.fromkeys(self.blocks)
            for handle in (
                hook_before(block, enter, with_kwargs=True, prepend=True),
                hook_behind(block, leave, with_kwargs=True),
            )
        ]
        try:
            record = execute(self.module, run)
        finally:
            for handle in handles:
                handle.remove()
        if not found or found[0].left is None:
            raise ValueError(
                f"{self.who}: training_step did not call the first block of {self.path!r}, so there is nothing to divide. Name"
                " the stack by layers=."
            )
        call = found[0]
        assert call.left is not None
        if call.left.shape != call.entered.shape:
            raise ValueError(self._other(f"a hidden state of shape {tuple(call.left.shape)}"))
        if call.entered.ndim == 3 and not self._joining.can_join(call.rest or (), call.left):
            raise ValueError(self._other(_NOT_TOKENS))
        return record, call

    def _search(self, call: _Call, tol: float) -> None:
        """Set the plan: the smallest set of divided arguments and shifted positions that gives the whole block's result."""
        dims = [dim for dim in (1, 0) if call.entered.ndim == 3 and call.entered.shape[dim] >= 2 * self.size]
        if not dims:
            raise ValueError(
                f"{self.who}: the hidden state of {self.path!r} has the shape {tuple(call.entered.shape)}; expected (samples,"
                f" tokens, features) with at least {2 * self.size} tokens. Use longer sequences, or set"
                " context_parallel_size=1."
            )
        reasons: list[str] = []
        for dim in dims:
            reason = self._search_along(dim, call, tol)
            if not reason:
                return
            reasons.append(reason)
        raise ValueError(
            f"{self.who}: a block of {self.path!r} computes something else on a part of the tokens than on all of them:"
            f" {reasons[0]}. {_WAY_OUT}"
        )

    def _search_along(self, dim: int, call: _Call, tol: float) -> str:
        """Search a plan for tokens along ``dim``; return why there is none, or an empty string."""
        length = call.entered.shape[dim]
        places: dict[Slot, int] = {}

        def note(slot: Slot, value: Tensor) -> Tensor:
            along = [i for i, size in enumerate(value.shape) if size == length]
            hidden = value.shape == call.entered.shape and torch.equal(value, call.entered)
            if len(along) == 1 and not hidden:
                places[slot] = along[0]
            return value

        mapped(call.args, note)
        mapped(call.kwargs, note)
        sites: set[Site] = set()
        tried: dict[frozenset[Any], str] = {}

        def fails(items: frozenset[Any]) -> str:
            if items not in tried:
                sliced = {slot: at for slot, at in places.items() if slot in items}
                shifted = frozenset(site for site in items if site in sites)
                tried[items] = self._trial(Plan(dim, sliced, shifted), call, tol, sites)
            return tried[items]

        every = frozenset[Any](places)
        for _ in range(3):  # a trial that fails early does not show all places
            known, every = len(sites), every | frozenset(sites)
            options = [frozenset[Any](), frozenset(sites), frozenset(places), every]
            options += [every - {item} for item in sorted(every, key=repr)]
            good = next((items for items in options if len(tried) < _TRIALS and not fails(items)), None)
            if good is not None:
                for item in sorted(good, key=repr):  # what the block does not need stays as it is
                    good = good - {item} if not fails(good - {item}) else good
                tried.pop(good)
                fails(good)  # sets the plan
                return ""
            if len(sites) == known:
                break
        return tried[every]

    def _trial(self, plan: Plan, call: _Call, tol: float, sites: set[Site]) -> str:
        """Run the first block with ``plan``; return why it is wrong, or an empty string. Collective."""
        self.plan, self._seen = plan, Seen()
        problem, found = "", None
        try:
            with undisturbed(self.module), self._trying():
                found, _ = split_output(self.blocks[0](*copied(call.args), **copied(call.kwargs)))
        except Exception as error:
            problem, found = self._seen.reason or described(error), None
        seen = self._seen
        if found is not None:
            assert call.left is not None
            error = (found.detach().double() - call.left.double()).norm()
            change = (call.left.double() - call.entered.double()).norm()
            norm = min(float(change), float(call.left.double().norm()))
            if not float(error) <= tol * norm:
                problem = self._difference(float(error) / max(norm, 1e-30), seen)
        if not problem and plan.dim == 0 and not any(seen.calls):
            problem = "no call of F.scaled_dot_product_attention uses tokens along dimension 0"  # but samples
        ranks: list[Any] = [None] * self.size
        dist.all_gather_object(ranks, (problem, sorted(seen.sites)), group=self.group)
        for _, others in ranks:
            sites.update(others)
        problem = problem_of(told for told, _ in ranks)
        if not problem:
            self.plan = Plan(plan.dim, plan.sliced, plan.shifted, tuple(seen.calls))
        return problem

    @staticmethod
    def _difference(error: float, seen: Seen) -> str:
        off = f"the result is off by {error:.2g} of its norm"
        if seen.by_hand and not seen.calls:
            return (
                f"{off}, and attention is computed with a softmax by hand, which cannot be divided. Use"
                " F.scaled_dot_product_attention (attn_implementation='sdpa' in Hugging Face models)"
            )
        if not any(seen.calls):
            return (
                f"{off}, and no call of F.scaled_dot_product_attention uses these tokens, so the block mixes tokens in another"
                " way (a convolution, a recurrence, statistics over tokens, another attention kernel)"
            )
        return (
            f"{off}, although its attention is divided rightly. Typical causes are positions that the block computes from the"
            " number of its tokens, convolutions, and statistics over tokens. Let the module compute positions outside of the"
            " blocks and pass them as arguments"
        )

    def _mean(self, run: Callable[[], Tensor]) -> Record | Finding:
        """Run a divided step, and return its record with the ranks' mean gradients; collective."""
        self._seen = None
        problem, record = "", Record()
        try:
            with self._trying():
                record = execute(self.module, run)
        except Exception as error:
            problem = described(error)
        ranks: list[Any] = [None] * self.size
        dist.all_gather_object(ranks, (problem, [*record.grads]), group=self.group)
        if failed := problem_of(told for told, _ in ranks):
            return Finding(f"it raised {failed}")
        names = dict.fromkeys(name for _, found in ranks for name in found)
        parameters = dict(self.module.named_parameters())
        for name in names:
            grad = record.grads.get(name)
            grad = torch.zeros_like(parameters[name]) if grad is None else grad.clone()
            dist.all_reduce(grad, group=self.group)
            record.grads[name] = grad / self.size
        return record
