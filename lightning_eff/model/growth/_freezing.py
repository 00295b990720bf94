"""The base of techniques that freeze blocks for a while and end the backward pass behind them."""

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
from lightning_eff.model.growth._identity import used_outside
from lightning_eff.model.growth._sizes.depth import check_distinct

Node = Any  # torch.autograd.graph.Node


def nodes_below(roots: Iterable[Node | None], *, stop: Container[Node] = ()) -> set[Node]:
    """Return the nodes of autograd's graph that ``roots`` were computed from, with ``roots``, up to ``stop`` and without
    it.
    """
    found = set[Node]()
    todo = [node for node in roots if node is not None]
    while todo:
        node = todo.pop()
        if node not in found and node not in stop:
            found.add(node)
            todo += [f for f, _ in node.next_functions if f is not None]
    return found


def leaves_of(nodes: Iterable[Node]) -> set[int]:
    """Return the ids of the parameters among ``nodes``."""
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}


def made_below(entered: Iterable[Iterable[Node]], of_loss: Iterable[Node]) -> dict[int, int]:
    """Return for each parameter the first block whose inputs, with those of earlier blocks, hold everything computed from
    it.

    A residual branch that leads past a block has also entered the block. A weight that is used elsewhere, such as an
    embedding tied to the head, is not included.

    Args:
        entered: for each block, the nodes of the hidden states that it was given.
        of_loss: the nodes that the loss was computed from.

    Returns:
        The index of the block, by the parameter's id.
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


class Freezing(Technique):
    """Says at each optimizer step which blocks are frozen, over all stacks of the most frequent block class.

    Layers whose output a block uses (embeddings, a stem, layers between the blocks) are frozen with that block, even if
    a residual branch leads past it, because only a part of their gradient would be left. They are found in the graph of
    the first training step. An embedding tied to the head keeps training there and gets no gradient from below.
    """

    needs: ClassVar[Need] = Need.BLOCKS
    refuses: ClassVar[Reasons] = {Part.PIPELINE: "the technique reads the autograd graph of the whole loss"}
    needs_budget: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True
    stage = Stage.MEASURE
    sparse_gradients: ClassVar[bool] = True
    layers: Any

    def _reset(self) -> None:
        self._stacks: list[BlockStack] = []
        self._below: list[list[str]] | None = None  # parameters below each block, but not below an earlier one
        self._plan: tuple[int, list[int]] = (0, [])
        self._length = 0
        self._share = 0.0  # the frozen fraction of the module's parameters
        self._where = ""

    @abstractmethod
    def plan(self, u: float, num_blocks: int) -> tuple[int, list[int]]:
        """Return how many blocks at the front the backward pass does not reach at ``u``, and which blocks are frozen."""

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
                    f"{who}: {stack} is checkpointed with use_reentrant=True, so a block gets no gradient if its input has"
                    " none. Enable checkpointing with gradient_checkpointing_kwargs={'use_reentrant': False}."
                )
        check_distinct(stacks, who=who, why="some blocks are frozen while others train")
        self._stacks = stacks
        self._where = f"{len(blocks)} blocks of {', '.join(repr(stack.path) for stack in stacks)}"
        if self._length and self._length != len(blocks):
            raise ValueError(
                f"{who}: the checkpoint's module has {self._length} blocks, but this one has {len(blocks)}. Build the module"
                f" with {self._length} blocks, or start a new fit."
            )
        if not self._length:  # a new run; a resumed one may be within an accumulation window and keeps its plan
            self._plan = self.plan(0.0, len(blocks))
        self._length = len(blocks)
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
        """Freeze what the plan says now, between optimizer steps."""
        plan = self.plan(session.progress.u, sum(stack.active for stack in self._stacks))
        if plan == self._plan or (plan[0] and self._below is None):  # the layers below are not known yet
            return
        self._plan = plan
        self._apply(session)
        for technique in session.working:
            if technique.drops_blocks:  # it always keeps a block that trains
                technique.on_blocks_changed(session)
        session.rewrap()

    def _apply(self, session: Session) -> None:
        """Freeze what the plan says, and nothing else."""
        still, held = self._plan
        blocks = [block for stack in self._stacks for block in stack.blocks[: stack.active]]
        frozen = [blocks[i] for i in held if i < len(blocks)]
        beside = used_outside(session.module, frozen)
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
                f"{type(self).__name__}: no parameter is left to train with {len(frozen)} of {self._where} frozen. Freeze"
                " fewer blocks, or leave more of the module trainable."
            )

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Find the layers below each block, in the first pass that has a graph."""
        if self._below is not None:
            return proceed(batch)
        blocks = [block for stack in self._stacks for block in stack.blocks]
        entered: list[list[Tensor]] = [[] for _ in blocks]  # also in passes without gradients

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
        """Raise ``ValueError`` if the module's own code checkpoints its blocks so that the graph does not show them."""
        nodes = nodes_below([loss.grad_fn])
        wanted = {
            id(p) for stack in self._stacks for block in stack.blocks for p in block.parameters() if p.requires_grad
        }
        hidden = bool(wanted) and not wanted & leaves_of(nodes)
        if hidden and any(node.name() == "CheckpointFunctionBackward" for node in nodes):
            raise ValueError(
                f"{type(self).__name__}: the {self._where} are checkpointed with use_reentrant=True, so a block gets no"
                " gradient if its input has none. Call checkpoint(..., use_reentrant=False)."
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
