"""FSDP2 for an unchanged module: one group per block, everything else with the root, and the way back."""

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
    """Runs a step of the LightningModule in one call of ``forward``, for FSDP2's root."""

    around: Callable[[], AbstractContextManager[None]] = nullcontext  # context of the step with whole parameters

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.around():
            return self.module(*args, **kwargs)


def blocks_of(module: nn.Module, layers: str | Sequence[str] | None, *, who: str) -> list[nn.Module]:
    """Return the blocks of the stack ``layers``, or of all stacks in ``module``, which can have none."""
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
    """Shard the parameters of ``root`` over ``mesh``, one group per block.

    The root's group has everything else: modules outside the blocks, blocks that share a parameter with those, and small
    blocks. Parameters that FSDP2 cannot shard (:func:`whole_in`) stay whole on every rank.

    Args:
        root: the module whose ``forward`` runs a step.
        blocks: modules in ``root``.
        mesh: mesh of the data-parallel ranks, with one axis, or with two for hybrid sharding.
        min_num_params: least size of a block with its own group, since messages of small blocks cost more than they send.
        reshard_after_forward: free whole parameters between forward and backward; None does so for blocks.
        with_rest: shard the root's group; otherwise it stays whole on every rank.
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
    """Shard each of this rank's pipeline stages, and return their roots.

    Args:
        stages: the runners of the stages.
        mesh: mesh of the data-parallel ranks.
        keep: keep whole weights between forward and backward passes. torch's split backward pass reads weights after a
            reshard frees them, and then trains wrongly without an error.
    """
    roots = [*stages]
    for runner in roots:
        # each of two stages here is a root, so parameters that both use stay whole and are averaged after the pass
        shard(runner, runner.blocks, mesh, reshard_after_forward=False if keep else None, with_rest=len(roots) == 1)
    return roots


def replicated(module: nn.Module, device: torch.device, options: Mapping[str, Any]) -> DistributedDataParallel:
    """Wrap the module in torch's DDP, on a separate stream of the device."""
    ids = None if device.type == "cpu" else [device.index]
    stream = nullcontext() if ids is None else torch.cuda.stream(torch.cuda.Stream())
    with stream:
        return DistributedDataParallel(module, device_ids=ids, **options)


def whole_in(params: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Return the parameters of an FSDP2 group that FSDP2 cannot shard.

    These are scalars, empty and complex parameters. FSDP2 reduces gradients of only one dtype, so trained parameters in
    another dtype than most elements of the group are included too.
    """
    params = list(params)
    whole = {p for p in params if p.ndim == 0 or p.numel() == 0 or p.is_complex()}
    sizes: dict[torch.dtype, int] = {}
    for p in params:
        if p.requires_grad and p not in whole:
            sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
    main = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return whole | {p for p in params if p.requires_grad and p.dtype != main}


def sharded_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Return the sharded parameters of ``root``, whose gradients FSDP2 averages."""
    return [p.sharded_param for p in _managed(root)]


def _managed(root: nn.Module) -> list[Any]:
    """Return FSDP2's record of each parameter."""
    return [p for m in groups(root) for g in m._get_fsdp_state()._fsdp_param_groups for p in g.fsdp_params]


def unreduced_gradients(root: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each sharded parameter with this rank's unsharded gradient from backward passes within :func:`no_sync`."""
    for p in _managed(root):
        grad = p.unsharded_accumulated_grad
        if grad is None and hasattr(p, "_unsharded_param"):  # missing before the first forward pass
            grad = p._unsharded_param.grad
        if grad is not None:
            yield p.sharded_param, grad


def put_unreduced(root: nn.Module, grads: Mapping[int, Callable[[nn.Parameter], Tensor]]) -> None:
    """Let the next backward pass add to these gradients; collective.

    Args:
        root: the sharded module.
        grads: for the id of a sharded parameter, a function that returns the unsharded gradient in the placements of the
            unsharded parameter, its argument.
    """
    for m in groups(root):
        m.unshard()
        for group in m._get_fsdp_state()._fsdp_param_groups:
            for p in group.fsdp_params:
                if (grad := grads.get(id(p.sharded_param))) is not None:
                    p.unsharded_accumulated_grad = grad(p.unsharded_param)
        m.reshard()


def lay_unreduced(root: nn.Module) -> None:
    """Give unreduced gradients the placements of their parameters, since tensor parallelism can leave partial sums."""
    for p in _managed(root):
        whole = getattr(p, "_unsharded_param", None)
        grad = None if whole is None else whole.grad
        if isinstance(whole, DTensor) and isinstance(grad, DTensor) and grad.placements != whole.placements:
            whole.grad = grad.redistribute(placements=whole.placements)


class InPlace:
    """Refuses forward passes that change parameters in place, if the change would be lost or differ between ranks.

    Args:
        module: the LightningModule.
        roots: modules that FSDP2 has sharded.
        divided: ids of the sharded parameters.
        mesh: mesh of all ranks.
        pipeline: this rank's stages, which can share parameters with other stages, or None.
        who: name of the caller in messages.
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
        why = "after the blocks, only on the last pipeline stage"
        self.stages = None if pipeline is None else Copies(mesh[PIPELINE].get_group(), who=who, why=why)
        self._looks = bool(roots)
        self._ran = False
        self._found: set[nn.Parameter] | None = None  # set within a checked step

    @contextmanager
    def looking(self, *, outside: bool) -> Iterator[None]:
        """Check the first training step, and later ones that still need a check; collective.

        Args:
            outside: whether a technique calls :meth:`own_step` in the step.

        Raises:
            ValueError: on all ranks, before any weight moves.
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
                raise lost(names, "shard=True gathers whole parameters only for the pass", who=self.who)
            self._looks = not all(ran for ran, _ in ranks)

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """Return the context of the module's own step, in which changes count.

        Changes by techniques around it do not count. Passes outside training do not either, since techniques try other weights
        in them.
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
        """Return the marks of unsharded parameters outside the blocks, by sharded parameter."""
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
    """Find the parameters that forward passes in this context change in place while they are unsharded.

    Args:
        root: the sharded module.
        found: the set to which the sharded parameters are added.
        itself: include the parameters outside the blocks.
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
            if before:  # a module can run within its own call
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
    """Update FSDP2's records after sharded parameters were replaced by others."""
    for p in _managed(root):
        p.reset_sharded_param()


def settle(root: nn.Module) -> None:
    """Make ``root`` FSDP2's root now. Otherwise the first module that runs becomes it, which can be a block."""
    root._get_fsdp_state()._lazy_init()  # pyright: ignore[reportCallIssue]


def gather_root(root: nn.Module) -> None:
    """Unshard the root's group for a pass that does not call the root, unless it is whole already."""
    root.unshard()  # pyright: ignore[reportCallIssue]


def groups(root: nn.Module) -> list[FSDPModule]:
    """Return the FSDP2 modules in ``root``."""
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


def reshard(root: nn.Module) -> None:
    """Register the sharded parameters again, including those that a root keeps whole after a forward pass."""
    for m in groups(root):
        m.reshard()


@contextmanager
def no_sync(root: nn.Module) -> Iterator[None]:
    """Return a context in which gradients accumulate without messages."""
    for m in groups(root):
        m.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for m in groups(root):
            m.set_requires_gradient_sync(True, recurse=False)


def unshard(root: nn.Module) -> None:
    """Undo :func:`shard` except for the parameters, so that the modules can be sharded again."""
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
