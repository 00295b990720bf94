"""Data, sharded-data, tensor and pipeline parallelism for an unchanged LightningModule, in one strategy.

It is built on ``torch.distributed.pipelining``'s schedules (Narayanan et al. 2021, arXiv:2104.04473; Qi et al.
2023, arXiv:2401.10241), ``fully_shard`` (Zhao et al. 2023, arXiv:2304.11277) and DTensor (Shoeybi et al. 2019,
arXiv:1909.08053).
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Either, Flag, Layers, Number, OneOf, Text
from lightning_eff._core._arguments.objects import Instance
from lightning_eff._core._lightning.names import adapted, like, package_of
from lightning_eff._core._needs.needs import Part
from lightning_eff._core.search_space import Choice, SearchSpace, needs_processes
from lightning_eff._core.session import is_open
from lightning_eff.strategies import _names
from lightning_eff.strategies._hybrid import layout
from lightning_eff.strategies._hybrid.arguments import (
    PipelineSplit,
    Settings,
    TensorPlan,
    Weight,
    check_arguments,
    check_optimizers,
    check_run,
    imported,
)
from lightning_eff.strategies._hybrid.reach import ReachedStrategy
from lightning_eff.strategies._hybrid.watch import Watch, WatchedLauncher

if TYPE_CHECKING:
    from lightning_eff.strategies._hybrid.replica import Replica

WHO = "HybridParallelStrategy"
TIMEOUT = timedelta(minutes=30)  # torch's own
Size = Annotated[int, Count()]


class HybridParallelStrategy(ReachedStrategy):
    """Train an unchanged LightningModule with data, context, tensor and pipeline parallelism.

    Use ``Trainer(strategy="hybrid_tp2_pp2", devices=8)``, or an instance with the arguments below, when a model does not fit
    on one device or many devices should share a step. The processes form a mesh of ``pipeline x data x tensor``, or of
    ``data x context``. Launchers, loggers, callbacks and loaders work as under DDP, and each data-parallel rank gets its own
    samples. The module needs no ``configure_model``. Its optimizers must treat each parameter separately, as AdamW does.

    - Data: the ranks hold replicas, or with ``shard`` they use FSDP2. Each rank then stores a part of the parameters,
      gradients and optimizer state, and a block is gathered only while it runs.
    - Context: the ranks divide the tokens of each sequence inside the blocks, and the heads in attention (Ulysses). All other
      code and evaluation get whole sequences, with routers' logits, so positions, labels and losses do not change. Setup
      compares loss and gradients with the whole module's, and refuses blocks that mix tokens outside of attention.
    - Tensor: linear layers are split by Hugging Face's own plan or by a proposed one. The plan is printed, and checked against
      the unsplit module on a batch at setup.
    - Pipeline: every rank runs the module's own ``training_step`` on micro-batches and skips the blocks of other stages.
      Blocks may leave small tensors next to the hidden state, such as routers' losses, which are those of each micro-batch.
      Setup finds the effects of the cut and the weights of micro-batches, and refuses modules that would train wrongly.
      Logged values are means over micro-batches. Every rank gets the values that a step leaves in metrics, lists and
      attributes, and runs evaluation steps in full.
    - Collectives: ``self.all_gather``, ``self.log(..., sync_dist=True)`` and metrics count each sample once.
    - Hooks: ``self.clip_gradients``, ``clip_grad_norm_``, ``clip_grad_value_`` and Lightning's ``grad_norm`` act on the whole
      model. Hooks that use gradients or parameters in other ways would see a part of them, and are refused at setup.

    Args:
        data_parallel_size: the number of replicas. "auto" uses the processes that the other sizes leave.
        shard: the sharding of parameters, gradients and optimizer state over the data-parallel ranks. False replicates them.
            A number shards them within groups of that many neighboring ranks (those of one machine) and replicates them over
            the groups (HSDP). Blocks are then gathered within a group, and only gradients travel between groups.
        min_num_params: the number of parameters from which a block is gathered by itself. Smaller blocks are gathered for the
            whole step, with everything outside the blocks. In a pipeline every block is gathered by itself.
        tensor_parallel_size: the number of processes that share each linear layer.
        pipeline_parallel_size: the number of processes that share the stack of blocks.
        schedule: "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV".
        num_microbatches: the number of parts of a batch, which must divide it. None is twice the number of stages.
        layers: the blocks, as a dotted path, a pattern or a list of paths. None finds the longest stack.
        tensor_parallel_plan: "auto", or a mapping of module paths to styles.
        pipeline_split: "balanced" (by parameters), or the number of blocks of each stage.
        context_parallel_size: the number of processes that share each sequence, without tensor or pipeline parallelism.
        sequence_parallel: whether tensor-parallel ranks divide the sequence between the split layers.
        save_distributed_checkpoint: whether to save a folder with each rank's part, which ``python -m
            lightning.fabric.utilities.consolidate_checkpoint`` merges into one file of the plain module's weights. False saves
            a file that loads strictly into the plain module and resumes in a plain Trainer, and rank 0 gathers the model in
            host memory. Both resume in any layout, and ``AsyncCheckpointIO()`` writes both in the background.
        init_on: the ranks on which ``configure_model`` and ``trainer.init_module()`` create weights. "rank0" sends parts to
            the other ranks. "meta" creates them module by module, with ``reset_parameters`` or the model's ``_init_weights``,
            so no process ever holds the whole model.
        gather_after_fit: the processes that get the whole weights at the end of a run. True is all of them. False is none, for
            models larger than a process's memory, and leaves the module on the meta device. Then save a checkpoint during
            the run, because none can be saved after it. "auto" is all, or rank 0 alone above 4 GiB.
        find_unused_parameters: as in DDPStrategy, with ``shard=False``: whether steps may leave parameters without gradients.
        failure_timeout: the seconds without a sign of life after which the processes of a machine or container count as dead.
            All other processes then stop with an error that names the ranks. On one machine, the death of a process is
            noticed within seconds. The watch uses the store at MASTER_PORT. None disables it.
        process_group_backend: as in DDPStrategy.
        timeout: the time limit of one message, as in DDPStrategy.
        microbatch_weight: the weight of a micro-batch in the loss of its batch, for a pipeline: a function of it that returns
            a number >= 0, or its dotted path. None finds it at setup (by samples, by counted elements, or a sum), or refuses.

    Raises:
        ValueError: for a value out of range, or sizes that do not multiply to the number of processes. At setup, if the
            module or the run cannot be divided, with the reason and a way out.
        RuntimeError: if another process failed.

    Example:
        >>> strategy = HybridParallelStrategy(tensor_parallel_size=2, pipeline_parallel_size=2)
        >>> trainer = L.Trainer(max_epochs=10, strategy=strategy)

    References:
        Shoeybi et al. 2019, arXiv:1909.08053; Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021,
        arXiv:2104.04473; Zhao et al. 2023 (FSDP), arXiv:2304.11277; Qi et al. 2023, arXiv:2401.10241; Jacobs et al. 2023
        (Ulysses), arXiv:2309.14509.
    """

    kind: ClassVar[str] = "strategy"
    saves: ClassVar[str] = (
        "memory: a process holds 1 / (data x tensor x pipeline) of the state, 1 / context of the blocks' activations; time"
    )
    paper: ClassVar[str] = (
        "Shoeybi et al. 2019; Huang et al. 2019 (GPipe); Narayanan et al. 2021; Zhao et al. 2023 (FSDP); Jacobs et al. 2023"
    )
    constraints: ClassVar[str] = "several processes; automatic optimization; a pipeline needs a stack of blocks"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"shard": Choice((True, False))},
        lambda profile: needs_processes(profile) or "its layout is planned by `lightning-eff plan`, not searched",
    )

    whole_heads = (
        False  # whether a technique of this run multiplies with the weights of the module's last layers by itself
    )

    @declared
    def __init__(
        self,
        data_parallel_size: Annotated[int | Literal["auto"], Either(OneOf("auto"), Count())] = "auto",
        shard: Annotated[bool | int, Either(Flag(), Count(at_least=2))] = True,
        tensor_parallel_size: Size = 1,
        pipeline_parallel_size: Size = 1,
        schedule: str = "1F1B",
        num_microbatches: Size | None = None,
        layers: Layers | None = None,
        tensor_parallel_plan: TensorPlan = "auto",
        pipeline_split: PipelineSplit = "balanced",
        context_parallel_size: Size = 1,
        sequence_parallel: bool = False,
        min_num_params: Annotated[int, Count(at_least=0)] = 2**20,
        save_distributed_checkpoint: bool = False,
        init_on: Literal["all", "rank0", "meta"] = "all",
        gather_after_fit: Annotated[bool | Literal["auto"], Either(Flag(), OneOf("auto"))] = "auto",
        find_unused_parameters: bool = False,
        failure_timeout: Annotated[float, Number(above=0)] | None = 300.0,
        process_group_backend: Annotated[str, Text("the name of a backend")] | None = None,
        timeout: Annotated[timedelta, Instance("a datetime.timedelta", (timedelta,))] | None = TIMEOUT,
        microbatch_weight: Weight | None = None,
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.settings = Settings(
            shard=shard,
            min_num_params=min_num_params,
            schedule=schedule,
            num_microbatches=num_microbatches,
            layers=layers,
            tensor_parallel_plan=tensor_parallel_plan,
            pipeline_split=pipeline_split,
            sequence_parallel=sequence_parallel,
            microbatch_weight=imported(microbatch_weight, who=WHO),
        )
        check_arguments(
            self.settings,
            data_parallel_size=data_parallel_size,
            sizes={"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size},
            context_parallel_size=context_parallel_size,
            find_unused_parameters=find_unused_parameters,
            who=WHO,
        )
        self.pipeline_parallel_size = pipeline_parallel_size
        self.context_parallel_size = context_parallel_size
        self.init_on = init_on
        self.gather_after_fit: bool | Literal["auto"] = gather_after_fit
        self.failure_timeout = failure_timeout
        self._layout: layout.Layout | None = None
        self._replica: Replica | None = None
        self._watch: Watch | None = None
        self.ddp_options = {"find_unused_parameters": True} if find_unused_parameters else {}  # of torch's DDP

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        from lightning_eff.strategies._hybrid.gradients import by_lists, steps_pieces

        computed: list[Any] = []

        def compute() -> Any:
            computed.append(closure())
            return computed[0]

        with steps_pieces(optimizer, lambda: bool(computed), who=WHO), by_lists(optimizer):
            return super().optimizer_step(optimizer, compute, model, **kwargs)

    # -- processes

    @property
    def layout(self) -> layout.Layout:
        """The sizes of the mesh, once the number of processes is known."""
        if self._layout is None:
            data: Any = self._data_parallel_size
            tensor, pipeline = int(self._tensor_parallel_size), self.pipeline_parallel_size
            others = {"context": self.context_parallel_size, "shard": self.settings.shard, "who": WHO}
            self._layout = layout.resolve(data, tensor, pipeline, self.world_size, **others)
        return self._layout

    @property
    def whole_steps(self) -> bool:
        """Whether each process can run the module's own ``training_step`` by itself, at any time."""
        sharded = bool(self.settings.shard) and self.layout.data > 1
        return not sharded and self.pipeline_parallel_size == self.context_parallel_size == 1

    @property
    def parts(self) -> list[Part]:
        """The ways in which this layout divides a run."""
        tensor, pipeline, data = int(self._tensor_parallel_size), self.pipeline_parallel_size, self._data_parallel_size
        copies = self.world_size // (tensor * pipeline) if data == "auto" else int(data) * self.context_parallel_size
        found = [Part.SHARD] if self.settings.shard and copies > 1 else []
        found += [Part.TENSOR] if tensor > 1 else []
        found += [Part.PIPELINE] if pipeline > 1 else []
        found += [Part.CONTEXT] if self.context_parallel_size > 1 else []
        return found or ([Part.COPIES] if copies > 1 else [])

    @property
    def splits_batches(self) -> bool:
        """Whether the module's ``training_step`` runs on parts of a batch, and only some of its blocks in each process."""
        return self.pipeline_parallel_size > 1

    @property
    def pipeline(self) -> Any:
        """The stages of this rank, once they are set up; None without pipeline parallelism."""
        return None if self._replica is None else self._replica.pipeline

    @property
    def splits_backward(self) -> bool:
        """Whether a separate backward pass computes the gradients of weights."""
        from lightning_eff.strategies._pipeline.order import SPLIT_BACKWARD, schedule_name

        return self.pipeline_parallel_size > 1 and schedule_name(self.settings.schedule, who=WHO) in SPLIT_BACKWARD

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = adapted(WatchedLauncher, package_of(self))(
            self.cluster_environment, self.num_processes, self.num_nodes, lambda: self._watch
        )

    @override
    def setup_environment(self) -> None:
        self.set_world_ranks()
        _ = self.layout  # wrong sizes raise before any process waits for another
        self._setup_distributed()
        if self._device_mesh is None or not torch.distributed.is_initialized():
            self._device_mesh = layout.make_mesh(self.layout, self.root_device)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh
        if self.failure_timeout is not None and self.world_size > 1:
            if self._watch is None or not self._watch.current:
                self._watch = Watch(self.failure_timeout, who=WHO)
            self._watch.start(self.lightning_module.trainer)

    # -- the module

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        nowhere = bool(empty_init) or self.init_on == "meta" or (self.init_on == "rank0" and self.global_rank != 0)
        with torch.device("meta") if nowhere else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        from lightning_eff.strategies._hybrid.replica import (
            Replica,  # loads torch's engines, which importing the package does not need
        )

        self.accelerator.setup(trainer)
        module = self.lightning_module
        self._replica = Replica(trainer, module, self.layout, self.device_mesh, self.settings, who=WHO)
        check_run(trainer, module, self.layout, replicated=self._replica.replicated, who=WHO)
        self.model = self._replica.divide()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Rebuild DDP, if it is used, so that it sees which parameters require gradients now."""
        assert self._replica is not None
        self.model = self._replica.wrap()

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        assert self._replica is not None
        with self._replica.whole():
            like(self, Strategy).setup_optimizers(self, trainer)
            check_optimizers(self.optimizers, self.layout, replicated=self._replica.replicated, who=WHO)
            self._replica.take_optimizers(self.optimizers)

    # -- steps

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert self._replica is not None
        return self._replica.accumulating()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._replica is not None
        self._replica.begin_step()
        step = super().training_step if self._replica.pipeline is None else self._replica.run_pipeline
        # with techniques, a session calls around_own_step; around a pipeline's step it stands by itself
        outside = is_open(self._replica.trainer) and self._replica.pipeline is None
        look = self._replica.in_place
        assert look is not None
        with look.looking(outside=outside), self._replica.stepping():
            return step(*args, **kwargs)

    def around_own_step(self) -> AbstractContextManager[None]:
        """Return the context of the module's own ``training_step``, inside everything that techniques put around it."""
        look = None if self._replica is None else self._replica.in_place
        return nullcontext() if look is None else look.own_step()

    def gradient_norm(self, pairs: Iterable[tuple[nn.Parameter, Tensor | None]]) -> Tensor:
        """Return the norm over all ranks of gradients, or of tensors in their layout, in pairs with parameters; collective."""
        assert self._replica is not None
        return self._replica.clipping.norm(pairs)

    def forward_step(self, *args: Any) -> Any:
        """Run ``training_step`` on a whole batch without gradients, on all ranks of a pipeline at once."""
        assert self._replica is not None
        with self._replica.evaluation():
            return self._replica.look(*args)

    def _evaluate(self, name: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._replica is not None
        self._replica.begin_step()
        if self._replica.pipeline is None:
            with self._replica.evaluation():
                return step(*args, **kwargs)
        return self._replica.evaluate_pipeline(name, args)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", super().predict_step, args, kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None and self._replica is not None
        plugin, module = self.precision_plugin, self.lightning_module
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        with self._replica.stepping():
            plugin.backward(closure_loss, self._replica.target, optimizer, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        self._replica.finish_gradients()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    # -- the end

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        trainer = module._trainer if module is not None else None
        failed = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        replica = self._replica
        self._end_run(gather=self.gather_after_fit, failed=failed)
        if not failed:
            self.barrier()  # so that no rank takes a finished rank for a dead one
        if self._watch is not None:
            self._watch.end()
        if replica is not None and not failed:
            replica.end_groups()
        if module is not None:
            self.model = module
            module._device_mesh = None
            if not any(p.is_meta for p in module.parameters()):
                module.cpu()
        super().teardown()
        self.checkpoint_io.teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        _names.register(strategy_registry, cls, WHO)


HybridParallelStrategy.register_strategies(StrategyRegistry)
