"""Data, sharded-data, tensor and pipeline parallelism of an unchanged LightningModule, as one strategy.

On torch's own engine: ``torch.distributed.pipelining``'s schedules (Narayanan et al. 2021, arXiv:2104.04473; Qi et al.
2023, arXiv:2401.10241), ``fully_shard`` (Zhao et al. 2023, arXiv:2304.11277) and DTensor (Shoeybi et al. 2019,
arXiv:1909.08053).
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._lightning.names import adapted, like, package_of
from lightning_eff._core._needs.needs import Part
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, needs_processes
from lightning_eff._core.session import is_open
from lightning_eff.strategies import _names
from lightning_eff.strategies._hybrid import layout
from lightning_eff.strategies._hybrid.arguments import Settings, check_arguments, check_optimizers, check_run, imported
from lightning_eff.strategies._hybrid.reach import ReachedStrategy
from lightning_eff.strategies._hybrid.watch import Watch, WatchedLauncher

if TYPE_CHECKING:
    from lightning_eff.strategies._hybrid.replica import Replica

WHO = "HybridParallelStrategy"
TIMEOUT = timedelta(minutes=30)  # torch's own


class HybridParallelStrategy(ReachedStrategy):
    """Train an unchanged LightningModule on data x tensor x pipeline parallel processes.

    ``Trainer(strategy="hybrid_tp2_pp2", devices=8)``, or an instance with the arguments below. The processes form a mesh
    of ``pipeline x data x tensor``; launchers, loggers, callbacks and loaders are as under DDP, and each data-parallel rank
    gets its own samples. The module needs no ``configure_model``. Its optimizers must treat each parameter by itself, as
    AdamW does: each process steps what it holds.

    - Data: replicas, or with ``shard`` FSDP2: parameters, gradients and optimizer state of each block lie in pieces on the
      data-parallel ranks and come together while the block runs.
    - Tensor: linear maps are split by Hugging Face's own plan or one that is proposed, checked against the unsplit module
      on a batch at setup, and printed.
    - Pipeline: every rank runs the module's own ``training_step`` on micro-batches, of which blocks of other stages are
      left out; torch's schedules order them. What the cut would change is found at setup, and so is what micro-batches
      weigh in the loss; what would be trained wrongly is refused. What a step logs is a mean over micro-batches: of
      ``self.log("perplexity", loss.exp())`` the mean of theirs, not the perplexity of their mean. Every rank gets what the
      step leaves in metrics, lists and attributes, and every rank runs the whole of evaluation steps.
    - Collectives: ``self.all_gather``, ``self.log(..., sync_dist=True)`` and metrics count each sample once.
    - Hooks: what they clip by ``self.clip_gradients``, ``clip_grad_norm_`` and ``clip_grad_value_``, and norms by Lightning's
      ``grad_norm``, are those of the whole model; hooks that make numbers of gradients or parameters by other ways would see
      a part, and are refused at setup by name.

    Args:
        data_parallel_size: replicas; "auto" takes what the other sizes leave of the processes.
        shard: divide parameters, gradients and optimizer state over the data-parallel ranks. False replicates them. A number
            divides them over groups of that many ranks next to one another (those of one machine), and replicates them over
            the groups (HSDP): a block then comes together within its group, and only gradients go from group to group.
        min_num_params: of a block that comes together by itself; smaller ones do with what is in no block, from the
            forward pass to the end of the backward pass. A pipeline's blocks all do by themselves.
        tensor_parallel_size: processes that share each linear map, >= 1.
        pipeline_parallel_size: processes that share the stack of blocks, >= 1.
        schedule: "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV".
        num_microbatches: into how many a batch is divided; it must divide the batch. None takes twice the stages.
        layers: the blocks, as a path, a pattern or a list of paths; None takes the longest.
        tensor_parallel_plan: "auto", or module path -> style.
        pipeline_split: "balanced" (by parameters), or the number of blocks of each stage.
        context_parallel_size: 1; see the error.
        sequence_parallel: divide what lies between the split maps along the sequence, over the tensor-parallel ranks.
        save_distributed_checkpoint: False writes one file that loads strictly into the plain module and resumes in a plain
            Trainer; rank 0 holds the whole model in host memory for it. True writes a folder of every rank's pieces, of
            which ``python -m lightning.fabric.utilities.consolidate_checkpoint`` makes one file with the plain module's
            weights. Both resume in any layout.
        init_on: where ``configure_model``, and ``with trainer.init_module()``, make weights: on "all" ranks, on "rank0"
            alone, from which the others get their pieces, or nowhere ("meta"): then each module's ``reset_parameters``, or
            the model's ``_init_weights``, makes them a module at a time, so no process ever holds the whole.
        gather_after_fit: which processes get the whole weights in their module when a run ends: all (True), or none (False,
            for models larger than a process's memory); where they are not, the module is on the meta device. "auto" gives
            them to all, but those of a model of more than 4 GiB to rank 0 alone, since each process of a machine would
            hold a copy. Save a checkpoint within the run where no process has them; after it none can be.
        find_unused_parameters: as in DDPStrategy, with shard=False: some steps leave parameters without a gradient.
        failure_timeout: seconds without a sign of life from a whole machine (or container) after which its processes count
            as dead. All other processes then stop with its ranks in the message. A process that dies beside others of its
            machine is noticed within seconds. The watch uses the store at MASTER_PORT. None keeps no watch.
        process_group_backend: as in DDPStrategy.
        timeout: of one message, as in DDPStrategy.
        microbatch_weight: for a pipeline: what a micro-batch weighs in its batch's loss, a function of it that returns a
            number >= 0, or its dotted path. None finds it at setup (by samples, by what counts, or added up), or refuses.

    Raises:
        ValueError: if an argument is out of range, or the sizes do not multiply to the number of processes; at setup, if
            the module or the run cannot be divided so, with the reason and a way out.
        RuntimeError: if another process failed.
    """

    kind: ClassVar[str] = "strategy"
    saves: ClassVar[str] = (
        "memory: 1 / (data x tensor x pipeline) of parameters and optimizer state a process; time on many"
    )
    paper: ClassVar[str] = (
        "Shoeybi et al. 2019; Huang et al. 2019 (GPipe); Narayanan et al. 2021; Zhao et al. 2023 (FSDP)"
    )
    constraints: ClassVar[str] = "several processes; automatic optimization; a pipeline needs a stack of blocks"
    survey: ClassVar[Survey | None] = Survey("data, tensor and pipeline parallelism", zhuang="3", shen="7.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"shard": Choice((True, False))},
        lambda profile: needs_processes(profile) or "its layout is planned (`lightning-eff plan`), not searched",
    )

    whole_heads = (
        False  # whether a technique of this run multiplies with the weights of the module's last layers by itself
    )

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        shard: bool | int = True,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        schedule: str = "1F1B",
        num_microbatches: int | None = None,
        layers: str | Sequence[str] | None = None,
        tensor_parallel_plan: Literal["auto"] | Mapping[str, str] = "auto",
        pipeline_split: Literal["balanced"] | Sequence[int] = "balanced",
        context_parallel_size: int = 1,
        sequence_parallel: bool = False,
        min_num_params: int = 2**20,
        save_distributed_checkpoint: bool = False,
        init_on: Literal["all", "rank0", "meta"] = "all",
        gather_after_fit: bool | Literal["auto"] = "auto",
        find_unused_parameters: bool = False,
        failure_timeout: float | None = 300.0,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        microbatch_weight: Callable[[Any], float] | str | None = None,
    ) -> None:
        check_arguments(
            who=WHO,
            sizes={
                "data_parallel_size": data_parallel_size,
                "tensor_parallel_size": tensor_parallel_size,
                "pipeline_parallel_size": pipeline_parallel_size,
            },
            shard=shard,
            context_parallel_size=context_parallel_size,
            flags={
                "sequence_parallel": sequence_parallel,
                "save_distributed_checkpoint": save_distributed_checkpoint,
                "find_unused_parameters": find_unused_parameters,
            },
            gather_after_fit=gather_after_fit,
            min_num_params=min_num_params,
            schedule=schedule,
            num_microbatches=num_microbatches,
            tensor_parallel_plan=tensor_parallel_plan,
            pipeline_split=pipeline_split,
            init_on=init_on,
            failure_timeout=failure_timeout,
            microbatch_weight=microbatch_weight,
        )
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
        self.pipeline_parallel_size = pipeline_parallel_size
        self.init_on = init_on
        self.gather_after_fit: bool | Literal["auto"] = gather_after_fit
        self.failure_timeout = failure_timeout
        self._layout: layout.Layout | None = None
        self._replica: Replica | None = None
        self._watch: Watch | None = None
        #: of torch's DDP, with which whole copies train
        self.ddp_options: dict[str, Any] = {"find_unused_parameters": True} if find_unused_parameters else {}

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
            size, tensor = self._data_parallel_size, self._tensor_parallel_size
            assert size != "auto" or isinstance(size, str)
            self._layout = layout.resolve(
                size,  # pyright: ignore[reportArgumentType]
                int(tensor),
                self.pipeline_parallel_size,
                self.world_size,
                shard=self.settings.shard,
                who=WHO,
            )
        return self._layout

    @property
    def whole_steps(self) -> bool:
        """Whether each process can run the module's own ``training_step`` by itself, at any time."""
        sharded = bool(self.settings.shard) and self.layout.data > 1
        return not sharded and self.pipeline_parallel_size == 1

    @property
    def parts(self) -> list[Part]:
        """In which ways this layout divides a run."""
        tensor, pipeline, data = int(self._tensor_parallel_size), self.pipeline_parallel_size, self._data_parallel_size
        copies = self.world_size // (tensor * pipeline) if data == "auto" else int(data)
        found = [Part.SHARD] if self.settings.shard and copies > 1 else []
        found += [Part.TENSOR] if tensor > 1 else []
        found += [Part.PIPELINE] if pipeline > 1 else []
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
        """Whether the gradients of weights come in a backward pass of their own."""
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
        _ = self.layout  # an error of arithmetic comes before any process waits for another
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
            Replica,  # with torch's engines, which imports need not load
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
        """Let DDP, where whole copies train, see anew which parameters take gradients."""
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
        with look.looking(outside=outside):
            return step(*args, **kwargs)

    def around_own_step(self) -> AbstractContextManager[None]:
        """What stands around the module's own ``training_step``, inside all that techniques put around it."""
        look = None if self._replica is None else self._replica.in_place
        return nullcontext() if look is None else look.own_step()

    def gradient_norm(self, pairs: Iterable[tuple[nn.Parameter, Tensor | None]]) -> Tensor:
        """The norm over all ranks of gradients, or tensors laid out as these are, each beside its parameter; collective."""
        assert self._replica is not None
        return self._replica.clipping.norm(pairs)

    def forward_step(self, *args: Any) -> Any:
        """In a pipeline, ``training_step`` on a whole batch without gradients, on all ranks at once."""
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
            self.barrier()  # nobody takes a rank that is done for one that is dead
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
