"""One replica of the module on its ranks: it is divided at setup, run in steps, and put together at the end."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchmetrics import metric

from lightning_eff._core.patches import Patches
from lightning_eff._core.steps import takes_index
from lightning_eff._core.wrapping import WrappingPrecision
from lightning_eff.strategies._hybrid import batches, gradients, sharding
from lightning_eff.strategies._hybrid import layout as layouts
from lightning_eff.strategies._hybrid.arguments import Settings, innermost
from lightning_eff.strategies._hybrid.clipping import Clipping
from lightning_eff.strategies._hybrid.hooks import check_hooks
from lightning_eff.strategies._hybrid.initial import Initial
from lightning_eff.strategies._hybrid.saving.files import Files
from lightning_eff.strategies._hybrid.saving.gathering import Gathering, owners, wanted_of
from lightning_eff.strategies._hybrid.saving.optimizer_state import NamedOptimizer, named, steps_apart
from lightning_eff.strategies._hybrid.saving.plain import Plain
from lightning_eff.strategies._hybrid.saving.window import Window
from lightning_eff.strategies._hybrid.shards import all_reduce_gradients, anywhere, broadcast, over_replicas
from lightning_eff.strategies._hybrid.structure import Structure

_BUCKET_BYTES = 250 * 2**20
_EMPTY: WeakSet[nn.Module] = WeakSet()  # modules whose weights were dropped with the processes' pieces after a run


class Replica:
    """This rank's part of one replica of the module; :meth:`divide` creates it.

    Attributes:
        plain: the record of the plain module.
        pipeline: this rank's stages, with several pipeline ranks.
        tensor: the plan of split layers, with several tensor-parallel ranks.
        context: divides sequences in the blocks, with several context-parallel ranks.
        stepping: returns the context of a training step, and of its backward pass.
        optimizers: the run's optimizers with names of parameters.
        files: the checkpoints.
        window: the gradients of an open accumulation window, for checkpoints.
        replicated: every process holds the whole model.
        in_place: refuses forward passes that change parameters in place.
        in_training_step: a pipeline's rank is in the training step.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        layout: layouts.Layout,
        mesh: DeviceMesh,
        settings: Settings,
        *,
        who: str,
    ) -> None:
        self.trainer, self.module, self.layout, self.mesh = trainer, module, layout, mesh
        self.settings, self.who = settings, who
        self.replicated = not layout.model_parallel and (not settings.shard or layout.data == 1)
        self.device: torch.device = trainer.strategy.root_device
        self.fitting = trainer.state.fn == "fit"
        self.plain: Plain
        self.gathering: Gathering
        self.files: Files
        self.window: Window
        self.pipeline: Any = None
        self.tensor: Any = None
        self.context: Any = None
        self.stepping: Callable[[], AbstractContextManager[None]] = nullcontext
        self.optimizers: list[NamedOptimizer] = []
        self._model: nn.Module = module
        self._roots: list[nn.Module] = []
        self._patches, self._structure = Patches(), Structure(module)
        self._layer_sync: Any = trainer.strategy._layer_sync  # pyright: ignore[reportAttributeAccessIssue]
        self._synced = self._divided = self._accumulating = self.in_training_step = False
        self._own_forward = "forward" in module.__dict__
        self._reduced: set[int] = set()  # parameters whose gradients FSDP2 reduces
        self._stash = gradients.Stash(module)
        self._buffers: list[Tensor] = []
        self._groups: list[dist.ProcessGroup] = []
        self.in_place: sharding.InPlace | None = None
        self._late: list[nn.Parameter] = []  # frozen when DDP is built, so DDP would not average them later

    # -- at setup

    def divide(self) -> nn.Module:
        """Divide the module, and return the module that runs its steps; collective over all ranks.

        Raises:
            ValueError: if the module cannot be divided in this way.
        """
        module, layout = self.module, self.layout
        if module in _EMPTY and self.trainer.ckpt_path is None:
            raise ValueError(
                f"{self.who}: {type(module).__name__} has no weights, because an earlier run failed or had"
                " gather_after_fit=False. Give a checkpoint"
                " (trainer.fit(..., ckpt_path=...), trainer.test(..., ckpt_path=...)), or a new module."
            )
        hooks = [] if self.replicated else check_hooks(self.trainer, module, layout, who=self.who)
        deferred = anywhere(any(t.is_meta for t in (*module.parameters(), *module.buffers())), self.device)
        plugin = self.trainer.precision_plugin
        if plugin.convert_module(module) is not module:
            raise ValueError(
                f"{self.who}: {type(plugin).__name__}.convert_module returned another module instead of converting it in place."
                " Use another precision plugin."
            )
        for inner in innermost(plugin):
            if self.fitting and isinstance(inner, WrappingPrecision):
                inner._agree()  # here all ranks take part; in a step, stages begin at different times
        if self.fitting and self._layer_sync is not None and layout.data > 1:
            self._layer_sync.apply(module)
            self._synced = True
        initial = Initial(module, who=self.who) if deferred else None
        if initial is None:
            self.trainer.strategy.model_to_device()
        self.plain = Plain(module, who=self.who)
        if initial is None and layout.world > 1:
            world = dist.group.WORLD
            assert world is not None
            tensors = {id(t): t.detach() for t in (*module.parameters(), *module.buffers())}
            broadcast(tensors.values(), world, most_bytes=_BUCKET_BYTES)
        if layout.samples == 1:  # keep the loader, since Lightning's sampler would shuffle in another order
            self._patches.set(self.trainer._accelerator_connector, "use_distributed_sampler", False)
        batch = None
        if layout.model_parallel:
            group = self._group_over(layouts.PIPELINE, layouts.TENSOR)
            batch = batches.agreed_batch(self.trainer, module, group, self.device, fitting=self.fitting, who=self.who)
            with self._structure.noting():
                self._divide_model(None if deferred else batch)
        if layout.context > 1:
            self._divide_sequences(deferred=deferred)
        self._find_owners()
        if initial is not None and self.replicated:
            initial.make(self.plain, self.held, self.device)
        self._wrap()
        if initial is not None and not self.replicated:
            initial.make(self.plain, self.held, self.device)
            for root in self._roots:
                sharding.take_up(root)
        for root in self._roots:
            sharding.settle(root)
        if self.context is not None:
            self.context.install()  # around the hooks of FSDP2
        self._reduced = {id(p) for root in self._roots for p in sharding.sharded_parameters(root)}
        self.in_place = sharding.InPlace(module, self._roots, self._reduced, self.mesh, self.pipeline, who=self.who)
        if deferred and self.pipeline is not None and batch is not None:
            with self.evaluation():
                self.pipeline.learn(self._step, batch)
        if layout.shares_samples:  # ranks of a replica have the same values, which a sum would count twice
            self._patches.set(metric, "gather_all_tensors", over_replicas(layouts.samples_group(self.mesh)))
        self.plain.release()
        self.files = Files(self.module, self.plain, self.gathering, self.device, whole=self.replicated, who=self.who)
        self.window = Window(self.plain, self.gathering, self.held, self._roots, reduces_each_pass=bool(self.pipeline))
        if self.layout.data > 1 and not self.replicated:
            current = self.plain.current()
            self._buffers = [
                current[name]
                for name, slot in self.plain.slots.items()
                if name in self.held and not slot.is_parameter and slot.persistent and slot.dtype.is_floating_point
            ]
        self.clipping = Clipping(self)  # and norms over all ranks
        if not self.replicated:
            self.clipping.install(self._patches, hooks)
        self._divided = True
        return self._model

    def _group_over(self, *axes: str) -> dist.ProcessGroup:
        self._groups.append(layouts.group_over(self.mesh, *axes))
        return self._groups[-1]

    def _step(self, batch: Any) -> Any:
        """Run the module's training step in its precision."""
        self._gather_roots()
        index = (0,) if takes_index(self.module.training_step) else ()
        return self._training_step(batch, *index)

    def _training_step(self, *args: Any) -> Any:
        self.in_training_step = self.pipeline is not None
        try:
            with self.trainer.precision_plugin.train_step_context():
                return self.module.training_step(*args)
        finally:
            self.in_training_step = False

    def _divide_model(self, batch: Any) -> None:
        """Apply tensor and pipeline parallelism, and check them on ``batch`` if there is one."""
        layout, settings = self.layout, self.settings
        if layout.pipeline > 1:
            from lightning_eff.strategies._pipeline.pipeline import Pipeline

            self.pipeline = Pipeline(
                self.module,
                layers=settings.layers,
                group=self.mesh[layouts.PIPELINE].get_group(),
                schedule=settings.schedule,
                num_microbatches=settings.num_microbatches,
                split=settings.pipeline_split,
                device=self.device,
                microbatch_weight=settings.microbatch_weight,
                who=self.who,
            )
            if batch is not None:
                self.pipeline.verify(self._step, batch)
            elif self.fitting:
                rank_zero_info(
                    f"{self.who}: the pipeline's cut is not checked, because there is no batch, or weights do not exist yet."
                )
        if layout.tensor > 1:
            from lightning_eff.strategies._tensor.plan import tensor_parallel

            self.tensor = tensor_parallel(
                self.module,
                self.mesh[layouts.TENSOR],
                settings.tensor_parallel_plan,
                None if batch is None else batches.loss_on(self.module, self._step, batch),
                sequence_parallel=settings.sequence_parallel,
                whole_heads=self.trainer.strategy.whole_heads,  # pyright: ignore[reportAttributeAccessIssue]
                who=self.who,
            )
            rank_zero_info(str(self.tensor))
        if self.pipeline is not None:
            self.pipeline.cut()

    def _divide_sequences(self, *, deferred: bool) -> None:
        """Divide the tokens of sequences inside the blocks, and check that on a batch if there is one."""
        from lightning_eff.strategies._context.dividing import Dividing

        group, layers = layouts.context_group(self.mesh), self.settings.layers
        self.context = Dividing(self.module, layers=layers, group=group, device=self.device, who=self.who)
        self.stepping = self.context.stepping
        batch = batches.agreed_batch(self.trainer, self.module, group, self.device, fitting=self.fitting, who=self.who)
        if batch is not None:
            self.context.learn(None if deferred else batches.loss_on(self.module, self._step, batch))

    def _find_owners(self) -> None:
        group = None if self.pipeline is None else self.mesh[layouts.PIPELINE].get_group()
        self.held, self.owner = owners(self.plain, None if self.pipeline is None else self.pipeline.owned_names, group)
        self.gathering = Gathering(self.mesh, self.owner.__getitem__, self.device)  # it outlives this object

    def _wrap(self) -> None:
        """Apply data parallelism to this rank's part: torch's DDP, FSDP2, or this strategy's averaging of gradients."""
        mesh = layouts.data_mesh(self.mesh)
        if self.layout.data == 1:
            return
        if self.replicated:
            if self.fitting:
                self._late = [p for p in self.module.parameters() if not p.requires_grad]
                options = self.trainer.strategy.ddp_options  # pyright: ignore[reportAttributeAccessIssue]
                self._model = sharding.replicated(self.module, self.device, options)
            return
        if not self.settings.shard:
            return
        if self.pipeline is None:
            root = sharding.Root(self.module)
            blocks = sharding.blocks_of(self.module, self.settings.layers, who=self.who)
            sharding.shard(root, blocks, mesh, min_num_params=self.settings.min_num_params)
            self._roots, self._model = [root], root
        else:
            self._roots += sharding.shard_stages(self.pipeline.stages, mesh, keep=self.pipeline.splits_backward)

    def wrap(self) -> nn.Module:
        """Rebuild torch's DDP around whole copies, and return the module that runs the steps."""
        if self.replicated:
            self._wrap()
        return self._model

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Show every parameter of the plain module, with placeholders for those of other ranks."""
        if self.pipeline is None:
            yield
            return
        stack, now = self.pipeline.stack, self.pipeline.stack.shown()
        stack.show(stack.blocks)
        try:
            with self.plain.shown(self.device):
                yield
        finally:
            stack.show(now)

    def take_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Name the parameters of optimizers that were built within :meth:`whole`."""
        shown = {id(p): name for name, p in self.module.named_parameters()}
        self.optimizers = self.files.optimizers = named(optimizers, shown, self.held, who=self.who)
        steps_apart(optimizers)

    # -- in a step

    @property
    def target(self) -> Any:
        """The object whose ``backward`` the precision plugin calls: the module, or the stored gradients of a pipeline."""
        return self.module if self.pipeline is None else self._stash

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Return a context in which backward passes do not exchange gradients."""
        self._accumulating = True
        own = isinstance(self._model, DistributedDataParallel)
        blocked: AbstractContextManager[Any] = self._model.no_sync() if own else nullcontext()  # pyright: ignore[reportCallIssue]
        if self._roots and self.pipeline is None:
            blocked = sharding.no_sync(self._roots[0])
        try:
            with blocked:
                yield
        finally:
            self._accumulating = False

    def begin_step(self) -> None:
        """Copy the buffers of the first replica to all replicas, like DDP."""
        if self._buffers:
            broadcast(self._buffers, layouts.data_group(self.mesh), most_bytes=_BUCKET_BYTES)

    def run_pipeline(self, batch: Any, *args: Any) -> Tensor:
        """Run the passes of all micro-batches; :meth:`Stash.backward` later adds the gradients."""

        def step(micro_batch: Any) -> Any:
            self._gather_roots()
            return self._training_step(micro_batch, *args)

        with self._stash.collecting():
            return self.pipeline.run(
                step,
                batch,
                accumulate=self.trainer.accumulate_grad_batches,
                before_reduce=None if self.tensor is None else self.tensor.normalize_gradients,
            )

    def look(self, batch: Any, *args: Any) -> Any:
        """Run a training step on a whole batch without gradients, on all ranks of the pipeline together."""
        self._gather_roots()
        return self.pipeline.look(lambda given: self._training_step(given, *args), batch)

    def _gather_roots(self) -> None:
        for root in self._roots:  # a stage's passes for shapes and evaluation do not go through its root
            sharding.gather_root(root)

    def evaluate_pipeline(self, name: str, args: tuple[Any, ...]) -> Any:
        """Run a validation, test or predict step on all ranks of the pipeline together."""
        context = getattr(self.trainer.precision_plugin, name.replace("validation", "val") + "_context")

        def step(batch: Any) -> Any:
            with context():
                return getattr(self.module, name)(batch, *args[1:])

        with self.evaluation():
            self._gather_roots()
            return self.pipeline.evaluate(step, args[0])

    def end_evaluation(self) -> None:
        """Free the memory of a validation, test or prediction run."""
        if self.pipeline is not None:
            self.pipeline.end_evaluation()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Return a context after which FSDP2's pieces are the parameters again, even without a backward pass."""
        try:
            yield
        finally:
            for root in self._roots:
                sharding.reshard(root)

    def finish_gradients(self) -> None:
        """After a backward pass, lay gradients out like their parameters and, unless they accumulate, average them."""
        if self.replicated:
            if self._late and not self._accumulating:
                all_reduce_gradients(self._late, layouts.data_group(self.mesh), mean=True)
            return
        if self.tensor is not None and self.pipeline is None:
            self.tensor.normalize_gradients()
            for root in self._roots if self._accumulating else ():
                sharding.lay_unreduced(root)
        if not self._accumulating and self.layout.data > 1:
            params = [p for p in self.module.parameters() if id(p) not in self._reduced]
            all_reduce_gradients(params, layouts.data_group(self.mesh), mean=True)

    # -- at the end

    def undo(self, *, gather: bool | Literal["auto"]) -> None:
        """Restore the plain module, with the trained weights if ``gather`` allows; collective unless it is False."""
        self._patches.restore()
        if self.context is not None:
            self.context.remove()
        if not self._own_forward:  # Lightning's redirection through a wrapper leaves one on the instance
            self.module.__dict__.pop("forward", None)
        if not self.replicated:
            self._undo_division(gather=gather)
        if self._synced:
            self._layer_sync.revert(self.module)

    def end_groups(self) -> None:
        """End the process groups of this run, which have threads, after all ranks are done."""
        for group in self._groups:
            dist.destroy_process_group(group)

    def _undo_division(self, *, gather: bool | Literal["auto"]) -> None:
        for root in self._roots:
            sharding.reshard(root)
        whole = None
        if gather and self._divided:
            wanted = wanted_of(self.plain, self.held, self.owner, buffers=self.pipeline is not None)
            whole = self.gathering.weights(wanted, everywhere=gather is True, who=self.who)
        for root in self._roots:
            sharding.unshard(root)
        self._structure.restore()
        if "plain" in self.__dict__:
            self.plain.restore(whole)
        _EMPTY.discard(self.module)
        if whole is None and self._divided and any(p.is_meta for p in self.module.parameters()):
            _EMPTY.add(self.module)
