"""The private names of torch, Lightning and torchmetrics that the package stands on, and where each must be found.

Whoever adds one says here where it is and, if there is one, why no public name does. ``test_private_names.py`` holds the
list against the code, and each name against the installed libraries.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torchdata.nodes import IterableWrapper, Loader
from torchmetrics import SumMetric

from tests.processes import free_port

#: Imported by name; nothing public gives them.
IMPORTED = (
    "lightning.fabric.strategies.deepspeed._DEEPSPEED_AVAILABLE",
    "lightning.fabric.strategies.registry._StrategyRegistry",
    "lightning.fabric.utilities.distributed._sync_ddp_if_available",
    "lightning.fabric.utilities.types._PATH",
    "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._dynamo.callback.callback_handler",
    "torch._dynamo.exc.TorchDynamoException",
    "torch._dynamo.utils.counters",
    "torch._dynamo.utils.get_compilation_metrics",
    "torch._inductor.cpp_builder.get_cpp_compiler",
    "torch._inductor.list_mode_options",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor",
    "torch.distributed._composable.contract.REGISTRY_KEY",
    "torch.distributed._composable.contract.STATE_KEY",
    "torch.distributed._composable_state._module_state_mapping",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook._should_compress",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.pipelining._backward.stage_backward_input",
    "torch.distributed.pipelining._backward.stage_backward_weight",
    "torch.distributed.pipelining._utils.generate_stage_to_rank_mapping",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "torch.fx.experimental._config",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.modules.conv._ConvNd",
    "torch.nn.modules.dropout._DropoutNd",
    "torch.nn.modules.loss._WeightedLoss",
    "torch.nn.utils.parametrizations._SpectralNorm",
    "torch.overrides._get_current_function_mode_stack",
    "torch.overrides._pop_mode",
    "torch.overrides._push_mode",
    "torch.utils._device.DeviceContext",
    "torch.utils._triton.has_triton",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_unflatten",
)

#: Attribute -> the module, or "module:Class", that must have it.
ON_MODULES_AND_CLASSES = {
    "_C": "torch",
    "_abort_process_group": "torch.distributed.distributed_c10d",
    "_add_configure_optimizers_method_to_model": "lightning.pytorch.cli:LightningCLI",
    "_autograd": "torch._C",
    "_broadcast_sigterm_tensor": "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop",
    "_base": "torch:Tensor",
    "_disabled_torch_function_impl": "torch._C",
    "_foreach_clamp_max_": "torch",
    "_foreach_clamp_min_": "torch",
    "_foreach_mul_": "torch",
    "_foreach_norm": "torch",  # torch.nn.utils.get_total_norm rounds to the gradients' type
    "_len_torch_function_stack": "torch._C",
    "_lru_cache_wrapper": "functools",
    "_make_wrapper_subclass": "torch:Tensor",
    "_call_impl": "torch.nn:Module",
    "_call_callback_hooks": "lightning.pytorch.trainer.call",
    "_call_lightning_module_hook": "lightning.pytorch.trainer.call",
    "_call_strategy_hook": "lightning.pytorch.trainer.call",
    "_Metadata": "lightning.pytorch.trainer.connectors.logger_connector.result",
    "_ResultMetric": "lightning.pytorch.trainer.connectors.logger_connector.result",
    "_Sync": "lightning.pytorch.trainer.connectors.logger_connector.result",
    "_compute_groups_create_state_ref": "torchmetrics:MetricCollection",
    "_cdata": "torch:UntypedStorage",
    "_compiled_call_impl": "torch.nn:Module",
    "_current_autograd_node": "torch._C",
    "_current_graph_task_id": "torch._C",
    "_configure_launcher": "lightning.pytorch.strategies:ModelParallelStrategy",
    "_fused_sdp_choice": "torch",
    "_get_iterator": "torch.utils.data:DataLoader",
    "_get_sequence_nr": "torch.autograd",
    "_get_fsdp_state": "torch.distributed.fsdp:FSDPModule",
    "_get_train_description": "lightning.pytorch.callbacks:RichProgressBar",
    "_global_backward_hooks": "torch.nn.modules.module",
    "_global_backward_pre_hooks": "torch.nn.modules.module",
    "_global_forward_hooks": "torch.nn.modules.module",
    "_global_forward_pre_hooks": "torch.nn.modules.module",
    "_index_sampler": "torch.utils.data:DataLoader",
    "_int_mm": "torch",
    "_is_view": "torch:Tensor",
    "_next_data": "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "_next_index": "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "_num_ready_batches_reached": "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop",
    "_on_before_batch_transfer": "lightning.pytorch:LightningModule",
    "_pop_mode": "torch.overrides",
    "_push_mode": "torch.overrides",
    "_reset_optimizers_and_schedulers": "lightning.pytorch.strategies:Strategy",
    "_scaled_dot_product_flash_attention_for_cpu": "torch.ops.aten",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "torch.ops.aten",
    "_scaled_mm": "torch",
    "_setup_distributed": "lightning.pytorch.strategies:ModelParallelStrategy",
    "_should_accumulate": "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop",
    "_should_check_val_fx": "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop",
    "_to_copy": "torch.ops.aten",
    "_top_saved_tensors_default_hooks": "torch._C._autograd",
    "_unsafe_view": "torch.ops.aten",
    "_version": "torch:Tensor",
    "_wrap_closure": "lightning.pytorch.plugins.precision:Precision",
}


def fsdp() -> nn.Module:
    """A module under FSDP2, of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    return fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))


def fsdp_state() -> Any:
    module = fsdp()
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def gathered() -> Any:
    """What FSDP2 knows of a parameter that was whole once."""
    module = fsdp()
    assert isinstance(module, FSDPModule)
    module.unshard()
    return module._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0]


def transposed() -> Any:
    """The node that a transposition puts into autograd's graph."""
    return torch.zeros(2, 3, requires_grad=True).transpose(0, 1).grad_fn


def scheduled() -> torch.optim.Optimizer:
    """An optimizer that has stepped under a scheduler, which watches whether it did."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step()
    return optimizer


def trainer() -> pl.Trainer:
    return pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)


#: Attribute -> an object that must have it.
ON_OBJECTS: dict[str, Callable[[], Any]] = {
    "_sequence_nr": lambda: (torch.ones((), requires_grad=True) + 1).grad_fn,
    "_num_workers": lambda: iter(torch.utils.data.DataLoader([0, 1])),
    "_dataset_fetcher": lambda: iter(torch.utils.data.DataLoader([0, 1])),  # torchdata's loader has it, too
    "_it": lambda: Loader(IterableWrapper([0])),  # asking for a state begins an iteration
    "_skip_next_val": lambda: pl.Trainer(logger=False).fit_loop.epoch_loop,
    "_signal_connector": lambda: pl.Trainer(logger=False),
    "_should_reload_train_dl": lambda: pl.Trainer(logger=False).fit_loop,
    "_seen_batches_per_dataloader": lambda: pl.Trainer(logger=False).fit_loop.epoch_loop.val_loop,
    "_run": lambda: pl.Trainer(logger=False),
    "_resuming_from_checkpoint": lambda: pl.Trainer(logger=False).fit_loop,
    "_results": lambda: pl.Trainer(logger=False),
    "_restarting": lambda: pl.Trainer(logger=False).fit_loop,
    "_restart_stage": lambda: pl.Trainer(logger=False).fit_loop,
    "_progress_bar_metrics": lambda: pl.Trainer(logger=False)._logger_connector,
    "_on_evaluation_model_train": lambda: pl.Trainer(logger=False).fit_loop.epoch_loop.val_loop,
    "_on_evaluation_end": lambda: pl.Trainer(logger=False).fit_loop.epoch_loop.val_loop,
    "_module_mode": lambda: pl.Trainer(logger=False).fit_loop.epoch_loop.val_loop,
    "_logged_metrics": lambda: pl.Trainer(logger=False)._logger_connector,
    "_last_val_dl_reload_epoch": lambda: pl.Trainer(logger=False).fit_loop.epoch_loop.val_loop,
    "_last_train_dl_reload_epoch": lambda: pl.Trainer(logger=False).fit_loop,
    "_last_global_step_saved": lambda: ModelCheckpoint(),
    "_has_run": lambda: pl.Trainer(logger=False).fit_loop.epoch_loop.val_loop,
    "_first_loop_iter": lambda: pl.Trainer(logger=False)._logger_connector,
    "_defer_save_until_validation": lambda: ModelCheckpoint(),
    "_link_checkpoint": lambda: ModelCheckpoint(),
    "_current_fx": lambda: pl.Trainer(logger=False)._logger_connector,
    "_sampler_iter": lambda: iter(torch.utils.data.DataLoader([0, 1])),
    "_task_info": lambda: iter(torch.utils.data.DataLoader([0, 1], num_workers=1)),
    "_accelerator_connector": trainer,
    "_backward_hooks": nn.Module,
    "_backward_pre_hooks": nn.Module,
    "_buffers": nn.Module,
    "_callback_metrics": lambda: trainer()._logger_connector,
    "_combined_loader": lambda: trainer().fit_loop,
    "_computed": SumMetric,
    "_data_fetcher": lambda: trainer().fit_loop,
    "_data_parallel_size": lambda: pl.strategies.ModelParallelStrategy(),
    "_ddp_comm_hook": lambda: pl.strategies.DDPStrategy(),
    "_ddp_kwargs": lambda: pl.strategies.DDPStrategy(),
    "_defaults": SumMetric,
    "_detect_anomaly": trainer,
    "_device_mesh": lambda: pl.strategies.ModelParallelStrategy(),
    "_duration": Timer,
    "_forward_cache": SumMetric,
    "_forward_hooks": nn.Module,
    "_forward_hooks_with_kwargs": nn.Module,
    "_forward_pre_hooks": nn.Module,
    "_fsdp_param_groups": fsdp_state,
    "_fsdp_use_orig_params": fsdp,
    "_is_fsdp_managed_module": fsdp,
    "_layer_sync": lambda: pl.strategies.DDPStrategy(),
    "_lazy_init": fsdp_state,
    "_logger_connector": trainer,
    "_module_to_pre_load_state_dict_hook_handle": lambda: fsdp_state()._fsdp_param_groups[0],
    "_module_to_pre_save_state_dict_hook_handle": lambda: fsdp_state()._fsdp_param_groups[0],
    "_modules": nn.Module,
    "_non_persistent_buffers_set": nn.Module,
    "_opt_called": scheduled,
    "_optimizer_load_state_dict_post_hooks": scheduled,
    "_optimizer_load_state_dict_pre_hooks": scheduled,
    "_optimizer_state_dict_post_hooks": scheduled,
    "_optimizer_state_dict_pre_hooks": scheduled,
    "_optimizer_step_post_hooks": scheduled,
    "_optimizer_step_pre_hooks": scheduled,
    "_orig_cls_mro_index": fsdp,
    "_parameters": nn.Module,
    "_parser": lambda: LightningCLI,
    "_post_forward_hook_handle": fsdp_state,
    "_post_load_hook_handle": lambda: fsdp_state()._fsdp_param_groups[0].fsdp_params[0],
    "_pre_forward_hook_handle": fsdp_state,
    "_schema": lambda: torch.ops.aten.add.Tensor,
    "_saved_dim0": transposed,
    "_saved_dim1": transposed,
    "_save_distributed_checkpoint": lambda: pl.strategies.ModelParallelStrategy(),
    "_state_dict_type": lambda: pl.strategies.FSDPStrategy(),
    "_tensor_parallel_size": lambda: pl.strategies.ModelParallelStrategy(),
    "_unsharded_param": gathered,
    "_update_count": SumMetric,
}

#: Internals that have no underscore: overridden, or read of what a private name gives.
INTERNALS: dict[str, Callable[[], Any]] = {
    "backward_one_chunk": lambda: PipelineStage,
    "backward_weight_one_chunk": lambda: PipelineStage,
    "fsdp_params": lambda: fsdp_state()._fsdp_param_groups[0],
    "reset_sharded_param": lambda: fsdp_state()._fsdp_param_groups[0].fsdp_params[0],
    "sharded_param": lambda: fsdp_state()._fsdp_param_groups[0].fsdp_params[0],
    "set_requires_gradient_sync": fsdp,
    "unsharded_accumulated_grad": gathered,
    "unsharded_param": gathered,
}

#: Of Python itself, of Hugging Face's conventions, and names of our own that the code sets by other ways.
OTHERS = {
    "_last_val_time": "Lightning sets it on the Trainer in a fit",
    "_exit": "os",
    "_exit_callbacks": "contextlib",
    "_getframe": "sys",
    "_init_weights": "Hugging Face",
    "_loader": "ours",
    "_local_shards": "torch's ShardedTensor, of which tests/strategies/test_folders.py copies some",
    "_recorder": "ours",
    "_replace": "named tuples",
    "_reconstructor": "copyreg, for objects that are pickled as another class",
}
