"""What two processes run of adapters under strategies that divide parameters, and one process that they are compared with."""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff import BitFit, HoulsbyAdapters, LoRA, PromptTuning, QuantizedBase, VeRA, VisualPromptTuning
from lightning_eff._core._stack.finding import candidates
from lightning_eff.strategies._hybrid.saving.gathering import Gathering
from tests.models import HuggingFace, make_batch, module, trainer
from tests.runs import largest
from tests.strategies.hybrid_jobs import Ordered, SaveAt, apart, everywhere, strategy_of

Build = Callable[[], list[Any]]
#: the model, and the techniques
TRIED: dict[str, tuple[str, Build]] = {
    "LoRA": ("gpt2", lambda: [LoRA(rank=4, b_rate=4.0, also=["ln_f"])]),
    "DoRA": ("tiny_gpt", lambda: [LoRA(rank=4, dora=True)]),
    "PiSSA": ("tiny_gpt", lambda: [LoRA(rank=4, pissa=True)]),
    "BitFit": ("tiny_gpt", lambda: [BitFit(also=["head"])]),
    "HoulsbyAdapters": ("tiny_gpt", lambda: [HoulsbyAdapters(4)]),
    "PromptTuning": ("short", lambda: [PromptTuning(4)]),
    "VisualPromptTuning": ("vit", lambda: [VisualPromptTuning(3)]),
    "VisualPromptTuning, shallow": ("vit", lambda: [VisualPromptTuning(3, deep=False)]),
    "VeRA": ("tiny_gpt", lambda: [VeRA(rank=8)]),
    "QuantizedBase": ("tiny_gpt", lambda: [QuantizedBase(4), LoRA(rank=4)]),
}
LARGE = {"short": 30.0, "vit": 30.0}  # rates of prompts


class Own(pl.LightningModule):
    """A module as users of FSDP2 write it: ``configure_model`` puts in the adapters, and divides what is there by then."""

    techniques: list[Any]

    def __init__(self, net: pl.LightningModule, techniques: list[Any]) -> None:
        super().__init__()
        self.net = net
        self.__dict__["techniques"] = techniques

    def configure_model(self) -> None:
        if self.techniques:
            eff.apply(self, *self.techniques)
        device_mesh: Any = self._device_mesh
        if device_mesh is None:  # one process
            return
        mesh = device_mesh["data_parallel"]
        inner: Any = self.net.model if isinstance(self.net, HuggingFace) else self.net
        for block in [m for stack in candidates(inner) if stack.composite for m in stack.container.children()]:
            fully_shard(block, mesh=mesh)
        fully_shard(inner, mesh=mesh)

    def forward(self, batch: Any) -> Tensor:
        if isinstance(self.net, HuggingFace):
            return self.net.model(**batch).loss
        return F.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch))


def made(
    name: str, techniques: list[Any], kind: str = "", *, rate: float | None = None, by_callback: bool = False
) -> Any:
    """The module, with first weights that are always the same.

    Args:
        name: of the model.
        techniques: that are put in.
        kind: "own" for :class:`Own`, "late" for blocks that ``configure_model`` makes.
        rate: of the optimizer; None for one at which each of them moves.
        by_callback: the run puts them in, and not :class:`Own`.
    """
    pl.seed_everything(1, verbose=False)
    late = {"built": "configure_model"} if kind == "late" else {}
    net: Any = module(name, num_layers=2, dropout=0.0, **late)
    if kind == "own":
        net = Own(net, [] if by_callback else techniques)
    lr = LARGE.get(name, 0.3) if rate is None else rate
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr, momentum=0.9)
    return net


def whole(net: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, put together."""
    named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    found = {k: (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu().clone() for k, t in named.items()}
    return {name.removeprefix("net."): t for name, t in found.items()}


class Holdings(pl.Callback):
    """What the optimizers hold as training begins, and how many parameters are divided."""

    def __init__(self) -> None:
        self.optimized: list[str] = []
        self.divided = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ids = {id(p) for o in trainer.optimizers for group in o.param_groups for p in group["params"]}
        named = {name.removeprefix("net."): p for name, p in pl_module.named_parameters()}
        self.optimized = sorted(name for name, p in named.items() if id(p) in ids)
        self.divided = sum(isinstance(p, DTensor) for p in named.values())


def run(
    tried: str | tuple[str, Build],
    strategy: Any = "auto",
    kind: str = "",
    *,
    devices: int = 2,
    steps: int = 4,
    save: str | None = None,
    resume: str | None = None,
    shift: float = 0.1,
    **of_model: Any,
) -> tuple[Any, Holdings]:
    """Train; the module, and what was held.

    Args:
        tried: of :data:`TRIED`, or as there.
        strategy: as the Trainer's.
        kind: as in :func:`made`.
        devices: processes.
        steps: of training.
        save: the checkpoint after two of them.
        resume: a checkpoint to go on from.
        shift: of the first weights on other ranks than the first, which must not count.
        of_model: as in :func:`made`.
    """
    model, build = TRIED[tried] if isinstance(tried, str) else tried
    techniques, held = build(), Holdings()
    net = made(model, techniques, kind, **of_model)
    if devices > 1 and int(os.environ["RANK"]) and kind != "own":
        with torch.no_grad():
            for p in net.parameters():
                p.add_(shift)
    elif devices > 1 and int(os.environ["RANK"]):
        pl.seed_everything(99, verbose=False)  # nor must what others would draw
    staged = getattr(strategy, "pipeline_parallel_size", 1) > 1  # where no callback may look at parameters
    callbacks = [*techniques, *([] if staged else [held]), *([SaveAt(2, save)] if save else [])]
    t = trainer(*callbacks, strategy=strategy, devices=devices, max_steps=steps, max_epochs=-1)
    t.fit(net, datamodule=Ordered(model, 16, 4), ckpt_path=resume)
    return net, held


def _fsdp2(**settings: Any) -> ModelParallelStrategy:
    return ModelParallelStrategy(
        **{"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False, **settings}
    )


def _hybrid(**settings: Any) -> Any:
    return strategy_of(settings, failure_timeout=None)


LAYOUTS: dict[str, tuple[Callable[[], Any], str]] = {
    "hybrid": (_hybrid, ""),
    "fsdp2": (_fsdp2, "own"),
    "tensor": (lambda: _hybrid(tensor_parallel_size=2), ""),
    "pipeline": (lambda: _hybrid(pipeline_parallel_size=2), ""),
    "grid": (lambda: _hybrid(tensor_parallel_size=2, data_parallel_size=2), ""),
}


def alone(name: str, kind: str, save: str | None = None) -> dict[str, Any]:
    """One process: the weights at first and at the end, and what was optimized."""
    model, build = TRIED[name]
    first = made(model, techniques := build(), kind)
    if kind == "own":
        first.configure_model()
    else:
        eff.apply(first, *techniques)
    net, held = run(name, "auto", kind, devices=1, save=save)
    return {"first": whole(first), "last": whole(net), "optimized": held.optimized}


def trained(cases: list[tuple[str, str]], directory: str) -> dict[str, Any]:
    """By layout and technique: what differs from one process, what was held and saved, and what a resumed run ends with."""
    found: dict[str, Any] = {}
    world = int(os.environ["WORLD_SIZE"])
    for layout, name in cases:
        strategy, kind = LAYOUTS[layout]
        one = torch.load(f"{directory}/{name} {kind}.pt", weights_only=True)
        path = f"{directory}/{layout} {name}.ckpt"
        net, held = run(name, strategy(), kind, devices=world, save=path)
        last, saved = whole(net), torch.load(path, weights_only=True)
        kept = {key.removeprefix("net.") for key in saved["state_dict"]}
        moved = sorted(n for n, t in one["first"].items() if not torch.equal(t, one["last"][n]))
        again, _ = run(name, strategy(), kind, devices=world, resume=path)
        found[f"{layout}: {name}"] = {
            "apart": apart(last, one["last"]),
            "moved": largest(float((one["first"][n] - one["last"][n]).abs().max()) for n in moved),
            "still": all(torch.equal(t, one["first"][n]) for n, t in last.items() if n not in moved),
            "optimized": one["optimized"] == moved and (held.optimized == moved or layout == "pipeline"),
            "counted": sum(len(g["params"]) for g in saved["optimizer_states"][0]["param_groups"]),
            "wanted": len(one["optimized"]),
            "divided": held.divided,
            "kept": sorted(kept) == one["optimized"],
            "resumed": largest(everywhere(apart(whole(again), last))),
        }
    return found


# -- what else


NEW: dict[str, tuple[str, Build]] = {
    "LoRA": ("tiny_gpt", lambda: [LoRA(rank=4)]),
    "HoulsbyAdapters": ("tiny_gpt", lambda: [HoulsbyAdapters(4)]),
    "VeRA": ("tiny_gpt", lambda: [VeRA(rank=8)]),
    "PromptTuning": ("short", lambda: [PromptTuning(4, init="uniform")]),
    "DoRA": ("tiny_gpt", lambda: [LoRA(rank=4, dora=True)]),
}


def first_of(name: str, strategy: Any = "auto", devices: int = 1) -> dict[str, Tensor]:
    """What an adapter begins with: the parameters that train, after a step at a rate of zero; lengths by what they are of."""
    net, _ = run(NEW[name], strategy, "late", devices=devices, steps=1, rate=0.0)
    found = {n: p.detach().clone() for n, p in net.named_parameters() if p.requires_grad}
    for n in (n for n in found if ".lora_magnitude" in n):  # of blocks that other random numbers made
        base = net.get_parameter(f"{n.partition('.lora_magnitude')[0]}.base_layer.weight")
        found[n] = found[n] - base.detach().norm(dim=1)
    return found


def started(directory: str) -> dict[str, Any]:
    """By how much first values differ from those of one process, where blocks are made on rank 0 alone, or nowhere."""
    found: dict[str, Any] = {}
    for where in ("rank0", "meta"):
        for name in NEW:
            one = torch.load(f"{directory}/first {name}.pt", weights_only=True)
            try:
                here = first_of(name, _hybrid(init_on=where), 2)
                found[f"{where}: {name}"] = max(everywhere(apart(here, one)))
            except ValueError as error:
                found[f"{where}: {name}"] = everywhere(str(error))
    return found


class Longer(pl.LightningDataModule):
    """Texts of 8 tokens; later on rank 1 alone of 16."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        lengths = [8, 16 if self.trainer.global_rank else 8, 8, 16]
        batches = [make_batch("tiny_gpt", 2, length=n, seed=i) for i, n in enumerate(lengths)]
        return DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]


def refused(tried: Any, strategy: Any, kind: str = "", **settings: Any) -> list[str]:
    """What is said on each rank."""
    try:
        run(tried, strategy, kind, **settings)
        said = "nothing"
    except (ValueError, RuntimeError) as error:
        said = str(error)
    return everywhere(said)


def saved(directory: str) -> dict[str, Any]:
    """What a file is put together of, what is said where it lacks something, and that what was moved is in it."""
    found: dict[str, Any] = {}
    asked: list[str] = []
    on_first = Gathering.on_first

    def noting(self: Gathering, name: str, *args: Any) -> Any:
        asked.append(name)
        return on_first(self, name, *args)

    with patch.object(Gathering, "on_first", noting):
        _, held = run("DoRA", _hybrid(), steps=3, save=f"{directory}/once.ckpt")
    found["put together"] = {name for name in asked if "blocks" in name} == {*held.optimized}
    for name in ("hybrid", "fsdp2"):
        strategy, kind = LAYOUTS[name]
        whole_one = torch.load(f"{directory}/{name} LoRA.ckpt", weights_only=True)
        lost = f"{directory}/{name} lost.ckpt"
        if int(os.environ["RANK"]) == 0:
            del whole_one["state_dict"][next(iter(whole_one["state_dict"]))]
            torch.save(whole_one, lost)
        torch.distributed.barrier()
        found[f"lost, {name}"] = refused("LoRA", strategy(), kind, resume=lost)
    net, _ = run("DoRA", _fsdp2(), "own", steps=1)
    name = "net.blocks.1.proj.base_layer.weight"
    if int(os.environ["RANK"]):
        with torch.no_grad():
            net.get_parameter(name).to_local().add_(1.0)
    net.trainer.save_checkpoint(f"{directory}/moved.ckpt")
    kept = torch.load(f"{directory}/moved.ckpt", weights_only=True)["state_dict"]
    found["moved"] = [key for key in kept if "lora" not in key] == [name]
    return found


def around(directory: str) -> dict[str, Any]:
    """What stands around training: longer texts on one rank, folders, merging, and other first weights."""
    found: dict[str, Any] = saved(directory)
    for name, (strategy, kind) in {"hybrid": LAYOUTS["hybrid"], "fsdp2": LAYOUTS["fsdp2"]}.items():
        prompts: list[Any] = [PromptTuning(4)]
        net = made("short", prompts, kind)
        t = trainer(*prompts, strategy=strategy(), devices=2, max_steps=4, use_distributed_sampler=False)
        t.fit(net, datamodule=Longer())
        found[f"longer, {name}"] = everywhere(t.global_step)

        path, model = f"{directory}/{name} LoRA.ckpt", TRIED["LoRA"][0]
        try:
            with torch.no_grad():
                other = made(model, techniques := TRIED["LoRA"][1](), kind)
                for p in other.parameters():
                    p.add_(0.1)
            t = trainer(*techniques, strategy=strategy(), devices=2, max_steps=4)
            t.fit(other, datamodule=Ordered(model, 16, 4), ckpt_path=path)
            said = "nothing"
        except ValueError as error:
            said = str(error)
        found[f"other weights, {name}"] = everywhere(said)

    every: tuple[str, Build] = ("tiny_gpt", lambda: [LoRA(rank=4, save="all")])
    for name, folder, kind in (
        ("hybrid", lambda: _hybrid(save_distributed_checkpoint=True), ""),
        ("fsdp2", lambda: _fsdp2(save_distributed_checkpoint=True), "own"),
    ):
        undisturbed, _ = run(every, folder(), kind, save=f"{directory}/folder {name}")
        again, _ = run(every, folder(), kind, resume=f"{directory}/folder {name}")
        found[f"folder, {name}"] = max(everywhere(apart(whole(again), whole(undisturbed))))

    net, _ = run("LoRA", _hybrid())
    found["merged"] = apart(whole(eff.export(net)), torch.load(f"{directory}/merged.pt", weights_only=True))
    to_here, _ = run("LoRA", _hybrid(), steps=2, resume=f"{directory}/one process.ckpt")
    end = torch.load(f"{directory}/at two.pt", weights_only=True)
    found["from one process"] = max(everywhere(apart(whole(to_here), end)))
    by_callback, _ = run("BitFit", _fsdp2(), "own", by_callback=True)  # which swaps nothing
    found["bit_fit alone"] = apart(
        whole(by_callback), torch.load(f"{directory}/BitFit own.pt", weights_only=True)["last"]
    )
    plans: dict[str, Any] = {}
    for plan in ({"blocks.0.qkv": "colwise"}, {"blocks.0.qkv.base_layer": "colwise"}):
        layout = _hybrid(tensor_parallel_size=2, tensor_parallel_plan=plan)
        plans[next(iter(plan))] = refused(NEW["LoRA"], layout, steps=1)[1]
    return {**found, "plans": plans}


def everything(cases: list[tuple[str, str]], directory: str) -> dict[str, Any]:
    """All of these, in one start."""
    return {"trained": trained(cases, directory), "around": {**started(directory), **around(directory)}}
