"""Blocks that take no gradient for a while, and the backward pass that ends behind them: what freezing techniques share."""

from abc import abstractmethod
from collections.abc import Container, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core.blocks import BlockStack, hidden_of, refuse_compiled_around
from lightning_eff._core.patches import hook_before
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Technique

Node = Any  # torch.autograd.graph.Node


def nodes_below(roots: Iterable[Node | None], *, stop: Container[Node] = ()) -> set[Node]:
    """The nodes of autograd's graph that ``roots`` were computed from, with themselves, as far as ``stop`` and without it."""
    found = set[Node]()
    todo = [node for node in roots if node is not None]
    while todo:
        node = todo.pop()
        if node not in found and node not in stop:
            found.add(node)
            todo += [f for f, _ in node.next_functions if f is not None]
    return found


def leaves_of(nodes: Iterable[Node]) -> set[int]:
    """Ids of the parameters among ``nodes``."""
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}


def made_below(entered: Iterable[Iterable[Node]], of_loss: Iterable[Node]) -> dict[int, int]:
    """By the ids of parameters, the first block whose input, or an earlier one's, has in it all that was made of them.

    What goes past a block on a residual branch has entered it, too. A weight that is used elsewhere, as a tied embedding is by
    the head, is not among them.

    Args:
        entered: for each block, the nodes of the hidden states that it was given.
        of_loss: the nodes that the loss was computed from.
    """
    depth: dict[Node, int] = {}
    for index, nodes in enumerate(entered):
        depth |= dict.fromkeys(nodes_below(nodes, stop=depth), index)
    found: dict[int, int | None] = {}
    for user in of_loss:
        for node, _ in user.next_functions:
            if hasattr(node, "variable"):
                last, at = found.get(id(node.variable), -1), depth.get(user)
                found[id(node.variable)] = None if last is None or at is None else max(last, at)
    return {key: index for key, index in found.items() if index is not None}


def used_beside(root: nn.Module, blocks: Iterable[nn.Module]) -> set[int]:
    """Ids of the parameters in ``root`` that modules hold which can be reached past ``blocks``."""
    seen, used, todo = {id(block) for block in blocks}, set[int](), [root]
    while todo:
        m = todo.pop()
        if id(m) not in seen:
            seen.add(id(m))
            used |= {id(p) for p in m.parameters(recurse=False)}
            todo += list(m.children())
    return used


class Freezing(Technique):
    """Says at each optimizer step which blocks take gradients, over all stacks of the class that most blocks are of.

    What was computed below a block (embeddings, a stem, layers between the blocks) is frozen with that block, also where a
    residual branch leads past the block: only a part of its gradient would be left. It is found in the graph of the first
    training step. A tied embedding is used by the head, too: it goes on training there, and takes nothing from below.
    """

    needs: ClassVar[Need] = Need.BLOCKS
    refuses: ClassVar[Reasons] = {Part.PIPELINE: "the technique reads the graph of the whole loss"}
    needs_budget: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True
    layers: Any

    def _reset(self) -> None:
        self._stacks: list[BlockStack] = []
        self._below: list[list[str]] | None = None  # parameters below each block, and below none before it
        self._plan: tuple[int, list[int]] = (0, [])
        self._length = 0
        self._share = 0.0  # of the module's parameters, that are frozen
        self._where = ""

    @abstractmethod
    def plan(self, u: float, num_blocks: int) -> tuple[int, list[int]]:
        """At ``u``: how many blocks at the front the backward pass does not reach, and which of all are frozen."""

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.MEASURE, self._link)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        who, stacks = type(self).__name__, session.stages(self.layers, who=type(self).__name__)
        blocks = [block for stack in stacks for block in stack.blocks]
        for stack in stacks:
            refuse_compiled_around(session.module, stack.path, who=who)
            if is_checkpointed_reentrantly(m for block in stack.blocks for m in block.modules()):
                raise ValueError(
                    f"{who}: {stack} is checkpointed with use_reentrant=True; expected use_reentrant=False, because a block"
                    " that is checkpointed so takes no gradient where its input has none. Enable checkpointing with"
                    " gradient_checkpointing_kwargs={'use_reentrant': False}."
                )
        if len({id(block) for block in blocks}) < len(blocks):
            raise ValueError(
                f"{who}: {' and '.join(map(str, stacks))} holds the same block several times; expected different ones,"
                " because some take gradients while others take none. Name another stack by layers=, or take the technique"
                " out."
            )
        self._stacks = stacks
        self._where = f"{len(blocks)} blocks of {', '.join(repr(stack.path) for stack in stacks)}"
        if self._length and self._length != len(blocks):
            raise ValueError(
                f"{who}: the checkpoint is of a module with {self._length} blocks, and this one has {len(blocks)}; expected"
                " as many. Build the module as it was, or start a new fit."
            )
        self._length = len(blocks)
        if self._below is None:
            self._plan = self.plan(0.0, len(blocks))
        self._apply(session)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if batch_idx % session.trainer.accumulate_grad_batches:
            return
        self._follow(session)

    @override
    def on_blocks_changed(self, session: Session) -> None:
        self._follow(session)

    def _follow(self, session: Session) -> None:
        """Freeze what the plan says by now, between optimizer steps."""
        plan = self.plan(session.progress.u, sum(stack.active for stack in self._stacks))
        if plan == self._plan or (plan[0] and self._below is None):  # what stands below is not known yet
            return
        self._plan = plan
        self._apply(session)
        for technique in session.working:
            if technique.drops_blocks:  # it keeps one that trains
                technique.on_blocks_changed(session)
        session.rewrap()

    def _apply(self, session: Session) -> None:
        """Freeze what the plan says, and nothing else."""
        still, held = self._plan
        blocks = [block for stack in self._stacks for block in stack.blocks[: stack.active]]
        frozen = [blocks[i] for i in held if i < len(blocks)]
        beside = used_beside(session.module, frozen)
        parameters = [p for block in frozen for p in block.parameters() if id(p) not in beside]
        named = dict(session.module.named_parameters())
        first = 0
        for stack in self._stacks:
            stack.still = min(still, stack.active)
            still -= stack.still
            for names in (self._below or [])[first : first + stack.still]:
                parameters += [named[name] for name in names if name in named]
            first += len(stack)
        held_now = self._stacks[0].held = list(dict.fromkeys(parameters))
        self._share = sum(p.numel() for p in held_now) / sum(p.numel() for p in named.values())
        for stack in self._stacks:
            stack.freeze_inactive()
        if not any(p.requires_grad for p in session.module.parameters()):
            raise ValueError(
                f"{type(self).__name__}: with {len(frozen)} of {self._where} frozen no parameter is left to train; expected"
                " some that take gradients in the other blocks or behind them. Freeze fewer, or leave more of the module"
                " trainable."
            )

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Find what stands below each block, in the first pass that has a graph."""
        if self._below is not None:
            return proceed(batch)
        blocks = [block for stack in self._stacks for block in stack.blocks]
        entered: list[list[Tensor]] = [[] for _ in blocks]  # also what passes that only look hand in

        def note(i: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                entered[i].append(hidden_of(args, kwargs))

            return hook

        handles = [hook_before(block, note(i), with_kwargs=True) for i, block in enumerate(blocks)]
        try:
            output = proceed(batch)
        finally:
            for handle in handles:
                handle.remove()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and loss.grad_fn is not None:
            self._refuse_hidden_blocks(loss)
            of_loss = nodes_below([loss.grad_fn])
            nodes = [[h.grad_fn for h in hidden if h.grad_fn in of_loss] for hidden in entered]
            below = made_below(nodes, of_loss)
            named = list(step.module.named_parameters())
            self._below = [[name for name, p in named if below.get(id(p)) == i] for i in range(len(blocks))]
        return output

    def _refuse_hidden_blocks(self, loss: Tensor) -> None:
        """Raise ``ValueError`` if the module's own code checkpoints its blocks in a way that hides them from the graph."""
        nodes = nodes_below([loss.grad_fn])
        wanted = {
            id(p) for stack in self._stacks for block in stack.blocks for p in block.parameters() if p.requires_grad
        }
        hidden = bool(wanted) and not wanted & leaves_of(nodes)
        if hidden and any(node.name() == "CheckpointFunctionBackward" for node in nodes):
            raise ValueError(
                f"{type(self).__name__}: the {self._where} are checkpointed with use_reentrant=True; expected"
                " use_reentrant=False, because a block that is checkpointed so takes no gradient where its input has none."
                " Call checkpoint(..., use_reentrant=False)."
            )

    @override
    def detach(self, session: Session) -> None:
        self._stacks = []

    @override
    def state_dict(self) -> dict[str, Any]:
        still, held = self._plan
        return {"still": still, "held": list(held), "below": self._below, "length": self._length}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._plan = (state_dict["still"], list(state_dict["held"]))
        self._below, self._length = state_dict["below"], state_dict["length"]
