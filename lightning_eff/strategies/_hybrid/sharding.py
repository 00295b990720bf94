"""FSDP2 around a module that knows nothing of it: one group for each block, the rest with the root, and the way back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_eff._core.blocks import find_stack, repeated
from lightning_eff._core.steps import looking as beside
from lightning_eff.strategies._hybrid.layout import PIPELINE, data_group
from lightning_eff.strategies._inplace import Copies, Mark, differ, lost, mark


class Root(nn.Module):
    """Makes a step of the LightningModule one call of ``forward``, where FSDP2's root acts."""

    around: Callable[[], AbstractContextManager[None]] = nullcontext  # what stands around the step, once all is whole

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.around():
            return self.module(*args, **kwargs)


def blocks_of(module: nn.Module, layers: str | Sequence[str] | None, *, who: str) -> list[nn.Module]:
    """The repeated blocks of ``module``: those of the stack ``layers``, or of every stack; none is legal."""
    found = (
        [find_stack(module, layers, who=who)] if layers is not None else [c for c in repeated(module) if c.composite]
    )
    blocks = [block for c in found for block in c.blocks]
    return list(dict.fromkeys(blocks))


def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    min_num_params: int = 0,
    reshard_after_forward: bool | None = None,
    with_rest: bool = True,
) -> None:
    """Divide the parameters of ``root`` over ``mesh``, a block at a time; what is in no block goes with the root.

    A block that shares a parameter with what is outside of it goes with the root too, and so does a small one. Parameters
    that FSDP2 cannot divide (:func:`whole_in`) stay whole on every rank.

    Args:
        root: the module whose ``forward`` runs a step.
        blocks: modules in it.
        mesh: of the data-parallel ranks: one axis, or two, of copies and of the ranks that share each.
        min_num_params: blocks with fewer are small: messages of their own would take longer than what they carry.
        reshard_after_forward: free a block's whole parameters between forward and backward; None does so for blocks.
        with_rest: divide what is in no block too; else it stays whole on every rank.
    """
    users: dict[int, int] = {}
    ignored: set[nn.Parameter] = set()
    blocks = list(blocks)
    inside = [{id(p) for p in block.parameters()} for block in blocks]
    for ids in inside:
        for key in ids:
            users[key] = users.get(key, 0) + 1
    within = {id(m) for block in blocks for m in block.modules()}
    for m in root.modules():
        if id(m) not in within:
            for p in m._parameters.values():
                users[id(p)] = users.get(id(p), 0) + 1
    for block, ids in zip(blocks, inside, strict=True):
        own = list(block.parameters())
        whole = whole_in(own)
        size = sum(p.numel() for p in own)
        if len(whole) < len(own) and size >= min_num_params and all(users[key] == 1 for key in ids):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, ignored_params=whole)
            ignored |= whole
    sharded = set(sharded_parameters(root))
    rest = [p for p in root.parameters() if p not in sharded and p not in ignored]
    ignored |= whole_in(rest) if with_rest else set(rest)
    fully_shard(root, mesh=mesh, reshard_after_forward=reshard_after_forward, ignored_params=ignored)


def shard_stages(stages: Iterable[Any], mesh: DeviceMesh, *, keep: bool) -> list[nn.Module]:
    """Shard each stage of a pipeline that is here; returns their roots.

    Args:
        stages: the runners.
        mesh: of the data-parallel ranks.
        keep: weights stay whole between forward and backward passes. torch's split backward passes look weights up after a
            reshard would have freed them, and train wrongly in silence.
    """
    roots = [*stages]
    for runner in roots:
        # of two stages here, each would be a root: what both use stays whole, and is averaged after the pass
        shard(runner, runner.blocks, mesh, reshard_after_forward=False if keep else None, with_rest=len(roots) == 1)
    return roots


def replicated(module: nn.Module, device: torch.device, options: Mapping[str, Any]) -> DistributedDataParallel:
    """torch's DDP around the module, made beside what the device computes."""
    ids = None if device.type == "cpu" else [device.index]
    stream = nullcontext() if ids is None else torch.cuda.stream(torch.cuda.Stream())
    with stream:
        return DistributedDataParallel(module, device_ids=ids, **options)


def whole_in(params: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Those of one FSDP2 group that FSDP2 cannot divide: scalars, empty and complex ones, and, since it reduces gradients of
    one dtype alone, those that train in another dtype than most elements of the group."""
    params = list(params)
    whole = {p for p in params if p.ndim == 0 or p.numel() == 0 or p.is_complex()}
    sizes: dict[torch.dtype, int] = {}
    for p in params:
        if p.requires_grad and p not in whole:
            sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
    main = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return whole | {p for p in params if p.requires_grad and p.dtype != main}


def sharded_parameters(root: nn.Module) -> list[nn.Parameter]:
    """The pieces, which FSDP2 steps with averaged gradients."""
    return [p.sharded_param for p in _managed(root)]


def _managed(root: nn.Module) -> list[Any]:
    """What FSDP2 knows of each parameter."""
    return [p for m in groups(root) for g in m._get_fsdp_state()._fsdp_param_groups for p in g.fsdp_params]


def unreduced_gradients(root: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each piece with the whole gradient of this rank that backward passes within :func:`no_sync` have summed."""
    for p in _managed(root):
        grad = p.unsharded_accumulated_grad
        if grad is None and hasattr(p, "_unsharded_param"):  # it has none before the first forward pass
            grad = p._unsharded_param.grad
        if grad is not None:
            yield p.sharded_param, grad


def put_unreduced(root: nn.Module, grads: Mapping[int, Callable[[nn.Parameter], Tensor]]) -> None:
    """Let the next backward pass add to these gradients; collective.

    Args:
        grads: id of a piece -> what makes the whole gradient, given the whole parameter whose placements it must have.
    """
    for m in groups(root):
        m.unshard()
        for group in m._get_fsdp_state()._fsdp_param_groups:
            for p in group.fsdp_params:
                if (grad := grads.get(id(p.sharded_param))) is not None:
                    p.unsharded_accumulated_grad = grad(p.unsharded_param)
        m.reshard()


def lay_unreduced(root: nn.Module) -> None:
    """Give unreduced gradients the placements of their parameters, whose pieces of tensor parallelism may be sums to come."""
    for p in _managed(root):
        whole = getattr(p, "_unsharded_param", None)
        grad = None if whole is None else whole.grad
        if isinstance(whole, DTensor) and isinstance(grad, DTensor) and grad.placements != whole.placements:
            whole.grad = grad.redistribute(placements=whole.placements)


class InPlace:
    """Refuses parameters that forward passes change in place, where the change would be lost or not the same on all ranks.

    Args:
        module: the LightningModule.
        roots: what FSDP2 has divided.
        divided: ids of the pieces.
        mesh: of all ranks.
        pipeline: the stages here, of which several may hold the same parameters; None without.
        who: for messages.
    """

    def __init__(
        self,
        module: nn.Module,
        roots: list[nn.Module],
        divided: set[int],
        mesh: DeviceMesh,
        pipeline: Any,
        *,
        who: str,
    ) -> None:
        self.module, self.roots, self.divided, self.pipeline, self.who = module, roots, divided, pipeline, who
        self.group = data_group(mesh)
        self.copies = Copies(self.group, who=who) if self.group.size() > 1 else None
        why = "after the blocks, on the last pipeline stage alone"
        self.stages = None if pipeline is None else Copies(mesh[PIPELINE].get_group(), who=who, why=why)
        self._looks = bool(roots)
        self._ran = False
        self._found: set[nn.Parameter] | None = None  # within a step that is looked at

    @contextmanager
    def looking(self, *, outside: bool) -> Iterator[None]:
        """Look at a training step, the first or one after it that is still to be looked at; collective.

        Args:
            outside: somebody else calls :meth:`own_step` in it.

        Raises:
            ValueError: on all ranks, before any weight has moved.
        """
        compared = [c for c in (self.copies, self.stages) if c is not None and not c.done]
        if not compared and not self._looks:
            yield
            return
        named = dict(self.module.named_parameters())
        found: set[nn.Parameter] = set()
        with ExitStack() as entered:
            for each in compared:
                every = named if each is self.copies else self.pipeline.shared_by_name()
                entered.enter_context(each.looking({n: p for n, p in every.items() if id(p) not in self.divided}))
            for root in self.roots if self._looks else ():
                entered.enter_context(marked(root, found, itself=not isinstance(root, Root)))
            self._found = found if self._looks else None
            tops = [root for root in self.roots if isinstance(root, Root)]
            if not outside and not tops:
                entered.enter_context(self.own_step())
            for top in tops if not outside else ():
                top.around = self.own_step
                entered.callback(top.__dict__.pop, "around", None)
            try:
                yield
            finally:
                self._found = None
        if self._looks:
            ids = {id(p) for p in found}
            ranks: list[Any] = [None] * self.group.size()
            mine = [name for name, p in named.items() if id(p) in ids]
            dist.all_gather_object(ranks, (self._ran, mine), group=self.group)
            if names := {name for _, rank in ranks for name in rank}:
                raise lost(names, "shard=True puts whole parameters together for the pass alone", who=self.who)
            self._looks = not all(ran for ran, _ in ranks)

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """Around the module's own step: what techniques write around it, as they put weights back, does not count.

        Nor does a pass beside training, within which they may try other weights.
        """
        with ExitStack() as entered:
            for each in (self.copies, self.stages):
                if each is not None:
                    entered.enter_context(each.own_step())
            found = None if beside() else self._found
            before = self._root_marks() if found is not None else {}
            yield
            if found is not None:
                self._ran = True
                after = self._root_marks() if before else {}
                found |= {p for p, then in before.items() if p in after and differ(then, after[p])}

    def _root_marks(self) -> dict[nn.Parameter, Mark]:
        """By piece, the mark of what lies in no block, where it is whole at the moment."""
        return {
            p.sharded_param: mark(p.unsharded_param)
            for root in self.roots
            if isinstance(root, Root)
            for group in root._get_fsdp_state()._fsdp_param_groups  # pyright: ignore[reportCallIssue]
            if group.is_unsharded
            for p in group.fsdp_params
        }


@contextmanager
def marked(root: nn.Module, found: set[nn.Parameter], *, itself: bool = True) -> Iterator[None]:
    """Note the pieces of parameters that forward passes in here change in place while they are whole.

    Args:
        root: the module, whose blocks are looked at.
        found: to which they are added.
        itself: look at those in no block, too.
    """
    taken: list[tuple[nn.Parameter, Any, Any]] = []
    handles: list[Any] = []
    for m in groups(root):
        if m is root and not itself:
            continue
        params = [p for g in m._get_fsdp_state()._fsdp_param_groups for p in g.fsdp_params]
        before: list[Any] = []

        @torch.compiler.disable
        def enter(*_: Any, params: list[Any] = params, before: list[Any] = before) -> None:
            before.append([] if beside() else [mark(p.unsharded_param) for p in params])

        @torch.compiler.disable
        def leave(*_: Any, params: list[Any] = params, before: list[Any] = before) -> None:
            if before:  # a module may run within its own call
                marks = before.pop()
                taken.extend((p.sharded_param, then, mark(p.unsharded_param)) for p, then in zip(params, marks))  # noqa: B905

        assert isinstance(m, nn.Module)
        hooks: tuple[Any, Any] = enter, leave
        handles += [m.register_forward_pre_hook(hooks[0]), m.register_forward_hook(hooks[1], prepend=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    found |= {p for p, then, now in taken if differ(then, now)}


def take_up(root: nn.Module) -> None:
    """Let FSDP2 know of pieces that were registered in the place of others."""
    for p in _managed(root):
        p.reset_sharded_param()


def settle(root: nn.Module) -> None:
    """Let FSDP2 take ``root`` as the root now, and not the first module that runs, which may be a block by itself."""
    root._get_fsdp_state()._lazy_init()  # pyright: ignore[reportCallIssue]


def gather_root(root: nn.Module) -> None:
    """Make what is in no block whole, for a pass that does not go through the root; nothing if it is whole already."""
    root.unshard()  # pyright: ignore[reportCallIssue]


def groups(root: nn.Module) -> list[FSDPModule]:
    """The FSDP2 modules in ``root``."""
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


def reshard(root: nn.Module) -> None:
    """Register the pieces again as the modules' parameters, also where a root keeps the whole after a forward pass."""
    for m in groups(root):
        m.reshard()


@contextmanager
def no_sync(root: nn.Module) -> Iterator[None]:
    """Let gradients of backward passes in here pile up without messages."""
    for m in groups(root):
        m.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for m in groups(root):
            m.set_requires_gradient_sync(True, recurse=False)


def unshard(root: nn.Module) -> None:
    """Undo :func:`shard` but for the parameters: classes, hooks and marks are gone, and the modules can be sharded anew."""
    for module in groups(root):
        state = module._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in state._fsdp_param_groups:
            handles = (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            )
            for handle in (h for by_module in handles for h in by_module.values()):
                handle.remove()
            for p in group.fsdp_params:
                p._post_load_hook_handle.remove()
        _forget(module)  # pyright: ignore[reportArgumentType]
    for module in root.modules():
        for key in ("_is_fsdp_managed_module", "_fsdp_use_orig_params", STATE_KEY, REGISTRY_KEY):
            module.__dict__.pop(key, None)


def _forget(module: nn.Module) -> None:
    cls = type(module)
    object.__setattr__(module, "__class__", cls.__mro__[cls._orig_cls_mro_index])  # pyright: ignore[reportAttributeAccessIssue]
    _module_state_mapping.pop(module, None)
