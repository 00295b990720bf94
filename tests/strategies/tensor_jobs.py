"""Jobs for processes that hold one module in parts: each case compares loss and gradients with the whole module's."""

import copy
import datetime
import gc
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from lightning_eff._core.blocks import find_stack
from lightning_eff.precision.fp8 import FP8Precision
from lightning_eff.strategies._tensor.plan import TensorPlan, tensor_parallel
from tests.models import LENGTH, TinyGPT
from tests.runs import largest
from tests.strategies.tensor_models import Attention, HandBlock, HandGPT, SwiGLU, build, step_of


class Root(nn.Module):
    """Runs a training step as its forward, as the root of FSDP2 must be."""

    def __init__(self, module: nn.Module, step: Callable[[], Tensor]) -> None:
        super().__init__()
        self.module, self.step = module, step

    def forward(self) -> Tensor:
        return self.step()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def equal(
    name: str,
    mesh: DeviceMesh,
    plan: Any = "auto",
    prepare: Callable[[nn.Module], None] | None = None,
    length: int = LENGTH,
    **kwargs: Any,
) -> dict[str, Any]:
    """Split the module ``name``; loss, gradients and parameters against the whole one in this process."""
    module, reference = build(name), build(name)
    if prepare is not None:
        prepare(module)
    step = step_of(module, name, length=length)
    expected = step_of(reference, name, length=length)()
    expected.backward()
    keys = list(module.state_dict())
    tp = tensor_parallel(module, mesh, plan, step, **kwargs)
    return {
        **measure(module, reference, tp, step, float(expected.detach())),
        "keys": list(module.state_dict()) == keys,
    }


def measure(
    module: nn.Module, reference: nn.Module, tp: TensorPlan, step: Callable[[], Tensor], expected: float
) -> dict[str, Any]:
    """How far loss, gradients and parameters of the split module are from the reference's."""
    torch.manual_seed(7)
    loss = step()
    loss.backward()
    tp.normalize_gradients()
    wrong, placements, moved = 0.0, True, 0.0
    others = dict(reference.named_parameters())
    for key, param in module.named_parameters():
        other = others[key]
        moved = largest([moved, float((whole(param) - other).detach().abs().max())])
        assert (param.grad is None) == (other.grad is None), key
        if param.grad is not None and other.grad is not None:
            wrong = largest([wrong, float((whole(param.grad) - other.grad).abs().max())])
            placements &= getattr(param, "placements", None) == getattr(param.grad, "placements", None)
    torch.manual_seed(7)
    with torch.inference_mode():
        evaluated = float(step())
    return {
        "loss": abs(float(loss.detach()) - expected),
        "evaluated": abs(evaluated - expected),
        "grad": wrong,
        "param": moved,
        "placements": placements,
        "share": tp.share,
        "plan": str(tp),
        "styles": {entry.path: str(entry.style) for entry in tp.entries},
        "notes": tp.notes,
        "verified": tp.verified,
    }


def fully_sharded(name: str, mesh: DeviceMesh, plan: Any = "auto", size: int = 4) -> dict[str, Any]:
    """dp x tp: the module in parts under ``fully_shard``, three SGD steps; against the whole batch in one process."""
    world = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("dp", "tp"))
    module = build(name)
    reference = copy.deepcopy(module)
    keys = list(module.state_dict())
    ranks = world["dp"].size()
    tp = tensor_parallel(module, world["tp"], plan, step_of(module, name, size))
    stack = find_stack(module, None, who="test")
    for block in stack.container.children():
        fully_shard(block, mesh=world["dp"])
    root = Root(module, step_of(module, name, size, world["dp"].get_local_rank(), ranks))
    fully_shard(root, mesh=world["dp"])
    steps = [step_of(reference, name, size, rank, ranks) for rank in range(ranks)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True) for m in (module, reference)]
    first = largest(
        float((whole(p.detach()) - q.detach()).abs().max())
        for p, q in zip(module.parameters(), reference.parameters(), strict=True)
    )
    grad = 0.0
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        root().backward()
        tp.normalize_gradients()
        for one in steps:
            (one() / ranks).backward()
        for (key, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), key
            if p.grad is not None and q.grad is not None:
                grad = largest([grad, float((whole(p.grad) - q.grad).abs().max())])
        for optimizer in optimizers:
            optimizer.step()
    moved = largest(
        float((whole(p.detach()) - q.detach()).abs().max())
        for p, q in zip(module.parameters(), reference.parameters(), strict=True)
    )
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in module.parameters())
    return {
        "first": first,
        "grad": grad,
        "param": moved,
        "plan": str(tp),
        "keys": list(module.state_dict()) == keys,
        "share": held / sum(p.numel() for p in reference.parameters()),
    }


MLP = {"blocks.*.mlp.gate": "colwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
ATTENTION = {"blocks.*.attention.[qkv]": "colwise", "blocks.*.attention.o": "rowwise"}
LLAMA = {f"model.layers.*.self_attn.{name}_proj": "rowwise" if name == "o" else "colwise" for name in "qkvo"}
# name -> (module, plan, whether it is checked)
PLANS: dict[str, tuple[str, Any, bool]] = {
    "mlp": ("hand", {**MLP, "embed": "embedding_rowwise", "head": "colwise_gather_output"}, True),
    "attention": ("hand", ATTENTION, True),
    "packed": ("fused", {"blocks.*.mlp.gate_up": "packed_colwise", "blocks.*.mlp.down": "rowwise"}, True),
    "qk_norm": (
        "qk_norm",
        {**ATTENTION, "blocks.*.attention.*_norm": "replicated_with_grad_allreduce", "norm": "sequence_parallel"},
        True,
    ),
    "conv1d": (
        "gpt2",
        {
            "model.transformer.h.*.attn.c_attn": "packed_colwise:32,32,32",
            "model.transformer.h.*.attn.c_proj": "rowwise",
            "model.transformer.h.*.mlp.c_fc": "colwise_gather_output",
            "model.transformer.h.*.mlp.c_proj": "rowwise_split_input",
        },
        True,
    ),
    "gather": ("tiny_gpt", {"**": "gather"}, True),
    "unchecked": ("llama", "auto", False),
    "unchecked_hand": ("tiny_gpt", "auto", False),
    # wrong
    "no_module": ("hand", {"blocks.*.fc1": "colwise"}, True),
    "no_style": ("hand", {"head": "diagonal"}, True),
    "empty": ("hand", {}, True),
    "word": ("hand", "megatron", True),
    "no_row": ("hand", {"blocks.*.mlp.gate": "colwise", "blocks.*.mlp.up": "colwise"}, True),
    "one_of_two": ("hand", {"blocks.0.mlp.gate": "colwise", "blocks.0.mlp.down": "rowwise"}, True),
    "literal_heads": (
        "literal",
        {"blocks.1.attention.qkv": "packed_colwise:16,16,16", "blocks.1.attention.o": "rowwise"},
        True,
    ),
    "norm_partial": ("qk_norm", ATTENTION, True),
    "rows_odd": ("tiny_gpt", {"head": "colwise_gather_output"}, True),
    "kv_heads": ("llama_1kv", LLAMA, True),
    "tied_apart": ("llama_tied", {"lm_head": "rowwise_split_input", "model.embed_tokens": "embedding_rowwise"}, True),
    "read_elsewhere": ("hand_tied", {"embed": "embedding_rowwise"}, True),
}


def planned(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """A plan of ``PLANS``; a refused one must leave the module as it was."""
    model, plan, checked = PLANS[name]
    module, untouched = build(model), build(model)
    before = {key: id(value) for key, value in module.named_parameters()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), type(m)) for m in module.modules()]
    try:
        run = step_of(module, model) if checked else None
        tp = tensor_parallel(module, mesh, plan, run, sequence_parallel=name == "mlp")
    except ValueError as error:
        kept = {key: id(value) for key, value in module.named_parameters()} == before
        kept &= [(len(m._forward_hooks), len(m._forward_pre_hooks), type(m)) for m in module.modules()] == hooks
        for (_, mine), (_, other) in zip(module.state_dict().items(), untouched.state_dict().items(), strict=True):
            kept &= torch.equal(mine, other)
        return {"error": str(error), "kept": kept}
    expected = step_of(untouched, model)()
    expected.backward()
    return measure(module, untouched, tp, step_of(module, model), float(expected.detach()))


def dropout(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """With dropout and random numbers seeded alike: equal to one process, on all ranks, in training."""
    torch.manual_seed(1)
    module = TinyGPT(num_layers=2, dropout=0.3) if name == "tiny_gpt" else build(name)
    object.__setattr__(module, "log", lambda *_, **__: None)
    reference = copy.deepcopy(module)
    torch.manual_seed(dist.get_rank())  # made equal by the plan
    state = torch.get_rng_state()
    tp = tensor_parallel(module, mesh, "auto", step_of(module, name))
    first = torch.get_rng_state()
    torch.manual_seed(7)
    expected = step_of(reference, name)()
    expected.backward()
    measured = measure(module, reference, tp, step_of(module, name), float(expected.detach()))
    states: list[Any] = [None] * mesh.size()
    dist.all_gather_object(states, (first, torch.get_rng_state()), group=mesh.get_group())
    alike = all(torch.equal(a, b) for pair in states for a, b in zip(pair, states[0], strict=True))
    return {**measured, "alike": alike, "kept": bool(torch.equal(first, state))}


def autocast(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """In bf16 autocast the same plan is found as in fp32, and gradients are those of autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return equal(name, mesh)


def recomputed(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """With every block under ``torch.utils.checkpoint``, reentrant or not."""

    def prepare(module: nn.Module) -> None:
        for block in find_stack(module, None, who="test").container.children():
            forward = block.forward
            block.forward = lambda x, f=forward: (
                checkpoint(f, x, use_reentrant=name == "reentrant") if torch.is_grad_enabled() else f(x)
            )

    return equal("hand", mesh, prepare=prepare)


def on_meta(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Split on the meta device, then given memory and values: the plain module's."""
    with torch.device("meta"):
        module = build(name)
    reference = build(name)
    tp = tensor_parallel(module, mesh, "auto", None, sequence_parallel=True)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for (_, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(p, DTensor)
            p.to_local().copy_(
                distribute_tensor(q.detach(), p.device_mesh, p.placements, src_data_rank=None).to_local()
            )
        for mine, other in zip(module.buffers(), reference.buffers(), strict=True):
            mine.copy_(other)
    expected = step_of(reference, name)()
    expected.backward()
    return measure(module, reference, tp, step_of(module, name), float(expected.detach()))


def memory(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Bytes of storage that parameters hold, by their own storages, and what of the whole is still alive."""
    module = build(name)
    whole_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    alive = [weakref.ref(p) for p in module.parameters()]
    tensor_parallel(module, mesh, "auto", step_of(module, name))
    gc.collect()
    locals_ = [p.to_local() for p in module.parameters() if isinstance(p, DTensor)]
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in locals_}.values())
    return {"share": held / whole_bytes, "alive": sum(ref() is not None for ref in alive)}


def float8(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Under FP8Precision: layers are split although their forward is exchanged, and compute in float8."""
    module, reference = build(name), build(name)
    plain = step_of(reference, name)()
    plain.backward()
    for m in (module, reference):
        FP8Precision(base="32-true", backend="emulated").convert_module(m)
    expected = float(step_of(reference, name)().detach())
    tp = tensor_parallel(module, mesh, "auto", step_of(module, name))
    assert expected != float(plain.detach())
    return measure(module, reference, tp, step_of(module, name), expected)


def odd_heads(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Attention with three heads on two ranks."""
    module = HandGPT(lambda: HandBlock(24, Attention(24, 3), SwiGLU(24)), dim=24)
    return {"plan": str(tensor_parallel(module, mesh, "auto", step_of(module, name)))}


def apart(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Ranks that begin with other weights, or get other batches."""
    module = build("hand")
    if name == "weights":
        with torch.no_grad():
            next(module.parameters()).add_(dist.get_rank())  # positions: the loss is the same
        step = step_of(module, "hand")
    else:
        step = step_of(module, "hand", 4, dist.get_rank(), mesh.size())
    return {"plan": str(tensor_parallel(module, mesh, "auto", step))}


KINDS: dict[str, Callable[[str, DeviceMesh], Mapping[str, Any]]] = {
    "equal": equal,
    "sequence": lambda name, mesh: equal(name, mesh, sequence_parallel=True),
    "odd_sequence": lambda name, mesh: equal(name, mesh, sequence_parallel=True, length=31),
    "fsdp": fully_sharded,
    "plan": planned,
    "dropout": dropout,
    "autocast": autocast,
    "recomputed": recomputed,
    "meta": on_meta,
    "memory": memory,
    "float8": float8,
    "odd_heads": odd_heads,
    "apart": apart,
}


def run_cases(*names: str) -> dict[str, Any]:
    """Cases ``<kind>:<name>`` in this process; one that raises gives ``{"error": "<type>: <message>"}``."""
    warnings.simplefilter("error")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    results: dict[str, Any] = {}
    for name in names:
        kind, _, case = name.partition(":")
        try:
            results[name] = dict(KINDS[kind](case, mesh))
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        dist.barrier()
    return results
