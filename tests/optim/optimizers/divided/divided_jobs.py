"""What several processes run for the tests of matrix optimizers whose parameters or work are divided over them."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_eff import SOAP, ExactResume, HybridParallelStrategy, Muon, ReplaceOptimizer, Shampoo
from lightning_eff.optim.optimizers import shampoo, soap
from lightning_eff.optim.optimizers._division.shards import local
from lightning_eff.optim.optimizers._muon import in_pieces
from tests.models import module
from tests.strategies.hybrid_jobs import fit
from tests.strategies.technique_jobs import shard_itself

RULES: dict[str, Callable[..., Any]] = {
    "Muon": lambda params, **more: Muon(params, 0.02, weight_decay=0.1, normalization="neuron", **more),
    "SOAP": lambda params, **more: SOAP(params, 0.02, weight_decay=0.1, refresh_steps=2, merge=8, **more),
    "Shampoo": lambda params, **more: Shampoo(params, 0.02, weight_decay=0.1, root_steps=2, block_size=5, **more),
}
#: a fused projection, experts, a convolution, wide and tall matrices, one with fewer rows than ranks, and a vector
SHAPES: dict[str, tuple[int, ...]] = {
    "blocks.0.qkv.weight": (18, 6),
    "blocks.0.up.weight": (12, 7),
    "mlp.experts.up": (3, 4, 6),
    "blocks.0.conv.weight": (4, 3, 2, 2),
    "blocks.0.down.weight": (5, 8),
    "blocks.0.small.weight": (2, 6),
    "blocks.0.bias": (5,),
}
#: a group that is added after some steps
ADDED: dict[str, tuple[int, ...]] = {"blocks.1.up.weight": (6, 4), "blocks.1.bias": (3,)}
STEPS, ADDED_AT, NONE_AT = 7, 4, 3


def start() -> int:
    """Begin, and return the number of processes."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_world_size()


def gathered(value: Any) -> list[Any]:
    """Every rank's value."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def layouts(world: int) -> dict[str, tuple[DeviceMesh, Callable[[int], list[Any]]]]:
    """Meshes with the placements of a tensor by its number of dimensions."""
    line = init_device_mesh("cpu", (world,))
    found: dict[str, tuple[DeviceMesh, Callable[[int], list[Any]]]] = {
        "rows": (line, lambda ndim: [Shard(0)]),
        "columns": (line, lambda ndim: [Shard(ndim - 1)]),
        "copies": (line, lambda ndim: [Replicate()]),
    }
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        found |= {
            "copies of shards": (grid, lambda ndim: [Replicate(), Shard(0)]),
            "shards of columns": (grid, lambda ndim: [Shard(0), Shard(ndim - 1) if ndim > 1 else Replicate()]),
            "a half": (grid["tensor"], lambda ndim: [Shard(0)]),
        }
    return found


def draw(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def whole(value: Any) -> Any:
    """The whole tensor of a DTensor, and anything else as it is; collective."""
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


class Trained:
    """The same steps on whole parameters, or on those that ``place`` divides."""

    def __init__(self, rule: str, place: Callable[[Tensor], Tensor] | None, **settings: Any) -> None:
        self.place = place or (lambda tensor: tensor.clone())
        self.params = {name: nn.Parameter(self.place(value)) for name, value in draw(SHAPES, 0).items()}
        self.optimizer = RULES[rule](list(self.params.items()), **settings)
        self.done = 0

    def step(self, *, without: str | None = None) -> None:
        if self.done == ADDED_AT:
            more = {name: nn.Parameter(self.place(value)) for name, value in draw(ADDED, 1).items()}
            self.optimizer.add_param_group({"params": list(more.items())})
            self.params |= more
        for name, grad in draw({n: tuple(p.shape) for n, p in self.params.items()}, 100 + self.done).items():
            none = name == without or (self.done == NONE_AT and name == "blocks.0.up.weight")
            laid = self.laid(grad, self.params[name])  # collective, so on all ranks
            self.params[name].grad = None if none else laid
        self.optimizer.step()
        self.done += 1

    @staticmethod
    def laid(grad: Tensor, p: nn.Parameter) -> Tensor:
        """A gradient like its parameter, or a pending sum where each rank has a copy of that."""
        if not isinstance(p, DTensor):
            return grad
        if all(placement.is_replicate() for placement in p.placements):
            return DTensor.from_local(grad / p.device_mesh.size(), p.device_mesh, [Partial()] * p.device_mesh.ndim)
        return distribute_tensor(grad, p.device_mesh, p.placements)

    def run(self, steps: int = STEPS) -> "Trained":
        for _ in range(steps):
            self.step()
        return self

    def left(self) -> dict[str, Any]:
        """Weights and state as whole tensors and numbers; collective."""
        found: dict[str, Any] = {name: whole(p.detach()) for name, p in self.params.items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            found |= {f"state {i} {key}": whole(value) for key, value in state.items()}
        return found


def far(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of tensors by name; raises if names or numbers differ."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    differences = [0.0]
    for name, value in a.items():
        if isinstance(value, Tensor) and value.ndim:
            assert value.shape == b[name].shape and value.dtype == b[name].dtype, name
            differences.append(float((value - b[name]).abs().max()))
        else:
            assert float(value) == float(b[name]), name
    return max(differences)


def placing(mesh: DeviceMesh, placements: Callable[[int], list[Any]]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: distribute_tensor(tensor.clone(), mesh, placements(tensor.ndim))


def in_every_layout() -> dict[str, dict[str, float]]:
    """How far each rule ends from one process, in each layout."""
    found: dict[str, dict[str, float]] = {}
    for layout, (mesh, placements) in layouts(start()).items():
        for rule in RULES:
            alone = Trained(rule, None, distributed=False).run().left()
            found.setdefault(layout, {})[rule] = far(Trained(rule, placing(mesh, placements)).run().left(), alone)
    return found


def fsdp_within_tensor() -> dict[str, float]:
    """FSDP2 on what tensor parallelism has divided along the same dimension, unevenly too."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    start()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found: dict[str, float] = {}
    for rule, make in RULES.items():
        results = []
        for divided in (True, False):
            torch.manual_seed(0)
            # square, as the first basis of another side is arbitrary where the gradient has no component
            net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
            if divided:
                plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(net, grid["tensor"], plan)
                fully_shard(net, mesh=grid["data"])
                assert any(isinstance(one, _StridedShard) for one in net[0].weight.placements)  # type: ignore[attr-defined]
            optimizer = make(list(net.parameters()), **({} if divided else {"distributed": False}))
            for step in range(4):
                x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                optimizer.zero_grad()
                net(x).square().sum().backward()
                optimizer.step()
            results.append({name: whole(p.detach()) for name, p in net.named_parameters()})
        found[rule] = far(*results)
    return found


# -- work and messages


@contextmanager
def counted(made: list[int]) -> Iterator[None]:
    """Count the matrices that this rank decomposes."""
    places: list[tuple[Any, str]] = [
        (in_pieces, "orthogonalize"),
        (soap, "first_basis"),
        (soap, "next_basis"),
        (shampoo, "inverse_root"),
    ]
    before = [getattr(where, name) for where, name in places]

    def counting(original: Any) -> Any:
        def call(matrices: Any, *args: Any, **kwargs: Any) -> Any:
            made.append(len(matrices))
            return original(matrices, *args, **kwargs)

        return call

    for (where, name), original in zip(places, before, strict=True):
        setattr(where, name, counting(original))
    try:
        yield
    finally:
        for (where, name), original in zip(places, before, strict=True):
            setattr(where, name, original)


SQUARE = {f"blocks.{i}.up.weight": (8, 8) for i in range(6)}


def work() -> dict[str, Any]:
    """By rule: what each rank decomposed, sent, and holds, of six matrices (8, 8) in pieces of their rows."""
    world = start()
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {}
    for rule in RULES:
        params = [(name, nn.Parameter(distribute_tensor(v, mesh, [Shard(0)]))) for name, v in draw(SQUARE, 0).items()]
        optimizer = {"Muon": Muon, "SOAP": SOAP, "Shampoo": Shampoo}[rule](params, 0.01, split=None)
        made: list[int] = []
        with counted(made):
            for step in range(2):
                for (_, p), grad in zip(params, draw(SQUARE, 10 + step).values(), strict=True):
                    p.grad = distribute_tensor(grad, mesh, [Shard(0)])
                optimizer.step()
                if step == 0 and rule == "Muon":
                    made.clear()  # it decomposes in each step, the others in the first
        values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        found[rule] = {
            "made": gathered(sum(made)),
            "sent": gathered(optimizer.sent_bytes),
            "state": gathered(sum(local(v).nbytes for v in values)),
        }
    return found


def copies_sent() -> dict[str, list[int]]:
    """What each rank sends of one matrix (8, 8) of two copies in two pieces each."""
    start()
    grid = init_device_mesh("cpu", (2, 2))
    p = nn.Parameter(distribute_tensor(torch.randn(8, 8), grid, [Replicate(), Shard(0)]))
    found: dict[str, list[int]] = {}
    for rule, cls in {"Muon": Muon, "Shampoo": Shampoo}.items():
        optimizer = cls([p], 0.01, split=None)
        p.grad = distribute_tensor(torch.randn(8, 8), grid, [Replicate(), Shard(0)])
        optimizer.step()
        found[rule] = gathered(optimizer.sent_bytes)
    return found


def under_ddp() -> dict[str, Any]:
    """Whole parameters with equal gradients: weights and state of each rule, and what each rank decomposed."""
    start()
    found: dict[str, Any] = {}
    for rule in ("SOAP", "Shampoo"):
        made: list[int] = []
        with counted(made):
            here = Trained(rule, None).run()
        share = sum(made)
        made.clear()
        with counted(made):
            alone = Trained(rule, None, distributed=False).run()
        a, b = here.left(), alone.left()
        equal = all(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in b)
        # each rank goes its own way afterwards
        apart, beside = Trained(rule, None), Trained(rule, None, distributed=False)
        for one in (apart, beside):
            one.run(2)
            one.done = 10 + dist.get_rank()
            one.run(3)
        found[rule] = {
            "equal": gathered(equal and a.keys() == b.keys()),
            "shares": gathered(share),
            "alone": sum(made),
            "sent": here.optimizer.sent_bytes >= 0,
            "apart": gathered(far(apart.left(), beside.left())),
        }
    return found


# -- failures


def failures() -> dict[str, dict[str, list[str]]]:
    """What each rank raises if one of them fails, or has no gradient where others do; and that a step is possible after."""
    world = start()
    mesh = init_device_mesh("cpu", (world,))
    last = dist.get_rank() == world - 1
    broken: dict[str, tuple[Any, str]] = {
        "Muon": (in_pieces, "orthogonalize"),
        "SOAP": (soap, "first_basis"),
        "Shampoo": (shampoo, "inverse_root"),
    }

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("no decomposition")

    found: dict[str, dict[str, list[str]]] = {}
    for rule, (where, name) in broken.items():
        original, raised = getattr(where, name), {}
        for what in ("failed", "no gradient", "fine"):
            trained = Trained(rule, placing(mesh, lambda ndim: [Shard(0)]))
            if what == "failed" and last:
                setattr(where, name, fail)
            try:
                trained.step(without="blocks.0.down.weight" if what == "no gradient" and last else None)
                text = ""
            except (ArithmeticError, RuntimeError, ValueError) as error:
                text = f"{type(error).__name__}: {error}"
            finally:
                setattr(where, name, original)
            raised[what] = gathered(text)
        found[rule] = raised
        whole_ones = Trained(rule, None)
        if rule != "Muon":
            if last:
                setattr(where, name, fail)
            try:
                whole_ones.step()
                text = ""
            except (ArithmeticError, RuntimeError) as error:
                text = f"{type(error).__name__}: {error}"
            finally:
                setattr(where, name, original)
            raised["whole"] = gathered(text)
    return found


# -- checkpoints


def reloaded() -> dict[str, dict[str, float]]:
    """How far each rule ends from an uninterrupted run if its state is saved and loaded, also in another layout."""
    world = start()
    found: dict[str, dict[str, float]] = {}
    mesh, placements = layouts(world)["rows"]
    rows = placing(mesh, placements)
    columns = placing(*layouts(world)["columns"])
    for rule in RULES:
        expected = Trained(rule, rows).run().left()
        before = Trained(rule, rows).run(5)
        state = before.optimizer.state_dict()
        full = deepcopy(state)
        full["state"] = {i: {k: whole(v) for k, v in s.items()} for i, s in state["state"].items()}
        shapes = [p.shape for group in before.optimizer.param_groups for p in group["params"]]

        def laid_out(place: Any, full: Any = full, shapes: Any = shapes) -> Any:
            """As Lightning's and our own strategies load a file: divided like the parameter where the shape is its own."""
            found = {
                i: {k: place(v) if isinstance(v, Tensor) and v.shape == shapes[i] else v for k, v in s.items()}
                for i, s in full["state"].items()
            }
            return {**full, "state": found}

        def go_on(place: Any, saved: Any, rule: str = rule, before: Any = before) -> dict[str, Any]:
            after = Trained(rule, place)
            after.done = ADDED_AT
            more = {name: nn.Parameter(after.place(value)) for name, value in draw(ADDED, 1).items()}
            after.optimizer.add_param_group({"params": list(more.items())})
            after.params |= more
            with torch.no_grad():
                for name, p in after.params.items():
                    p.copy_(after.place(whole(before.params[name].detach())))
            after.optimizer.load_state_dict(deepcopy(saved))
            after.done = 5
            again = after.left()
            assert far(again, before.left()) == 0.0, "what was loaded is what is saved"
            return after.run(STEPS - 5).left()

        found[rule] = {
            "same layout": far(go_on(rows, state), expected),
            "whole state": far(go_on(rows, laid_out(rows)), expected),
            "other layout": far(go_on(columns, laid_out(columns)), expected),
            "one process": far(go_on(None, full), expected),
        }
    return found


STRATEGIES: dict[str, tuple[type[ModelParallelStrategy], dict[str, Any]]] = {
    "fsdp2": (ModelParallelStrategy, {"data_parallel_size": 2, "tensor_parallel_size": 1}),
    "hybrid": (HybridParallelStrategy, {"data_parallel_size": 2, "min_num_params": 0}),
    "tensor": (HybridParallelStrategy, {"tensor_parallel_size": 2}),
    "pipeline": (HybridParallelStrategy, {"pipeline_parallel_size": 2}),
    "grid": (HybridParallelStrategy, {"tensor_parallel_size": 2, "min_num_params": 0}),
    "copies": (HybridParallelStrategy, {"shard": 2, "min_num_params": 0}),
}


def fitted(
    rule: str, directory: Path, strategy: Any = "auto", devices: int = 1, resume: Path | None = None
) -> tuple[Tensor, pl.Trainer]:
    """The whole weights after seven steps, with a checkpoint after the fourth."""
    pl.seed_everything(3 if resume is None else 4, verbose=False)
    net: Any = module("tiny_gpt", dropout=0.0, num_layers=2).double()
    if type(strategy) is ModelParallelStrategy:
        shard_itself(net, [])
    make = {  # of eps, see muon_jobs.fsdp2
        "Muon": lambda: Muon(net, normalization="neuron", adam={"lr": 1e-3, "eps": 1e-3}),
        "SOAP": lambda: SOAP(net, lr=1e-3, eps=1e-3, refresh_steps=2, max_dim=16),
        "Shampoo": lambda: Shampoo(net, lr=1e-3, graft_eps=1e-3, eps=1e-2, root_steps=2),
    }
    callbacks: list[pl.Callback] = [ExactResume()]
    if rule == "Replaced":
        net.configure_optimizers = lambda: torch.optim.AdamW(net.parameters(), 1e-3, eps=1e-3)
        callbacks.append(ReplaceOptimizer(SOAP, lr=1e-3, eps=1e-3, refresh_steps=2, max_dim=16))
    else:
        net.configure_optimizers = make[rule]
    callbacks.append(ModelCheckpoint(directory, every_n_train_steps=4, save_top_k=-1, filename="{step}"))
    _, run = fit(
        net,
        "tiny_gpt",
        strategy,
        devices=devices,
        batch_size=8,
        steps=7,
        callbacks=tuple(callbacks),
        gradient_clip_val=1.0,
        enable_checkpointing=True,
        ckpt_path=resume,  # type: ignore[arg-type]
    )
    return torch.cat([whole(p.detach()).flatten() for p in net.parameters()]), run


def in_runs(root: str, names: list[str]) -> dict[str, Any]:
    """By rule, layout and + for a folder of pieces: the weights of a run, and whether a resumed one ends with them."""
    world = start()
    found: dict[str, Any] = {}
    for one in names:
        rule, _, layout = one.partition(" ")
        cls, sizes = STRATEGIES[layout.rstrip("+")]
        directory, settings = Path(root, one), {**sizes, "save_distributed_checkpoint": layout.endswith("+")}
        weights, _ = fitted(rule, directory, cls(**settings), world)
        again, _ = fitted(rule, directory, cls(**settings), world, resume=directory / "step=4.ckpt")
        found[one] = {
            "weights": weights.tolist(),
            "again": gathered(float((again - weights).abs().max())),
            "alike": gathered(weights.tolist()).count(weights.tolist()) == world,
        }
    return found


def two(root: str) -> dict[str, Any]:
    names = [f"SOAP {layout}" for layout in ("fsdp2", "fsdp2+", "hybrid", "hybrid+", "tensor", "pipeline")]
    names += ["Muon fsdp2", "Muon hybrid+", "Shampoo fsdp2+", "Shampoo hybrid", "Replaced hybrid+"]
    return {
        "layouts": in_every_layout(),
        "work": work(),
        "ddp": under_ddp(),
        "failures": failures(),
        "reloaded": reloaded(),
        "runs": in_runs(root, names),
    }


def four(root: str) -> dict[str, Any]:
    return {
        "layouts": in_every_layout(),
        "within": fsdp_within_tensor(),
        "work": work(),
        "copies": copies_sent(),
        "ddp": under_ddp(),
        "failures": failures(),
        "reloaded": reloaded(),
        "runs": in_runs(root, ["SOAP grid", "Shampoo grid+", "SOAP copies+"]),
    }
