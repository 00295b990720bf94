"""What two processes run for the tests of folders of pieces that are written in the background."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig

from lightning_eff._core._checkpoints import folders, writer
from lightning_eff._core._checkpoints.background import LightningSaves
from lightning_eff._core._checkpoints.staging import staged
from lightning_eff._core.patches import Patches
from tests.models import loader
from tests.runs import Interrupt, differences
from tests.strategies.folder_runs import STEPS, Late, SaveAt, fit, made, quiet, replaced
from tests.strategies.hybrid_jobs import Settings, everywhere
from tests.strategies.resume_jobs import NAN, left


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    """Everything that a checkpoint holds, by its place in it."""
    if isinstance(value, dict):
        return {key: v for k, inner in value.items() for key, v in _flat(inner, f"{at}/{k}").items()}
    if isinstance(value, list | tuple):
        return {key: v for k, inner in enumerate(value) for key, v in _flat(inner, f"{at}/{k}").items()}
    return {at: value}


def _differing(first: Path, second: Path) -> list[str]:
    """The places in two folders whose values differ."""
    a, b = (_flat(_load_distributed_checkpoint(path)) for path in (first, second))
    a, b = ({k: v for k, v in each.items() if not k.endswith("milliseconds")} for each in (a, b))  # by the clock
    assert len(a) > 50
    return sorted(key for key in a.keys() | b.keys() if key not in a or key not in b or not _same(a[key], b[key]))


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal, where NaN equals itself."""
    if not isinstance(a, Tensor | float):
        return a == b
    return torch.equal(*(torch.as_tensor(value).nan_to_num(nan=NAN) for value in (a, b)))


def snapshots(directory: str, cases: dict[str, list[str]]) -> dict[str, Any]:
    """Which values of folders that are written late differ from those that Lightning or the strategy writes at once.

    The folder of step 2 is written when that of step 4 is saved, and that of step 4 when the run is over.
    """
    quiet()
    found: dict[str, Any] = {}
    for case, names in cases.items():
        strategy, now, late = case.partition(" ")[0], Path(directory, case, "now"), Path(directory, case, "late")
        fit(strategy, names, [SaveAt(now, [2, 4])], background=False)
        with replaced(writer, "one_thread", Late):
            fit(strategy, names, [SaveAt(late, [2, 4])])
        found[case] = [_differing(now / f"{step}.ckpt", late / f"{step}.ckpt") for step in (2, 4)]
        assert _differing(now / "2.ckpt", now / "4.ckpt"), "nothing changed between the saves"
    return found


def resumed(directory: str, cases: dict[str, list[str]]) -> dict[str, Any]:
    """What differs on each rank after a run that is interrupted twice, and resumed from folders that are written late.

    A pair of steps whose gradients GradientNoiseScale compares has no checkpoint in between.
    """
    quiet()
    found: dict[str, Any] = {}
    for case, names in cases.items():
        strategy, path = case.partition(" ")[0], None
        whole = left(*fit(strategy, names, background=False))
        with replaced(writer, "one_thread", Late):
            for step in (2, 4):
                stop = Interrupt(Path(directory, case, f"{step}.ckpt"), step=step)
                fit(strategy, names, [stop], resume=path)
                path = stop.path
        found[case] = everywhere(differences(whole, left(*fit(strategy, names, resume=path))))
    return found


class _Listing(pl.Callback):
    """What is in the folder of checkpoints as each batch ends: which are complete, and which are not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[list[str]] = []
        self.partial: list[str] = []

    def on_train_batch_end(self, *args: Any) -> None:
        dist.barrier()
        paths = sorted(self.folder.glob("*.ckpt")) if self.folder.is_dir() else []
        self.seen.append([path.name for path in paths])
        self.partial += [p.name for p in paths if not ((p / "meta.pt").is_file() and (p / ".metadata").is_file())]
        dist.barrier()


def kept(directory: str, strategies: list[str]) -> dict[str, Any]:
    """The checkpoints that ModelCheckpoint keeps, as each batch ends and after the run, written at once and late."""
    quiet()
    choices: dict[str, Settings] = {
        "newest": {"filename": "{step}", "save_top_k": 1},
        "all of one name": {"filename": "same", "save_top_k": -1},
        "last": {"filename": "{step}", "save_top_k": 1, "save_last": True},
        "linked": {"filename": "{step}", "save_top_k": 1, "save_last": "link"},
        "best two": {"filename": "same", "save_top_k": 2, "monitor": "score"},
    }
    found: dict[str, Any] = {}
    for strategy in strategies:
        for name, choice in choices.items():
            result: dict[str, Any] = {}
            for background in (False, True):
                folder = Path(directory, strategy, name, str(background))
                listing, score = _Listing(folder), _Score()
                keep = ModelCheckpoint(folder, every_n_train_steps=1, **choice)
                during: list[list[str]] = []
                with replaced(writer, "one_thread", Late), _at_writing(folder, during):
                    fit(strategy, callbacks=[score, keep, listing], background=background, enable_checkpointing=True)
                result[str(background)] = {
                    "after": sorted(p.name for p in folder.iterdir()),
                    "seen": listing.seen,
                    "partial": listing.partial,
                    "during": during,
                    "best": Path(keep.best_model_path).name,
                    "last": Path(keep.last_model_path).name,
                    "steps": {p.name: _step_of(p) for p in sorted(folder.glob("*.ckpt"))},
                    "own": "file_exists" in vars(keep),
                }
            found[f"{strategy}, {name}"] = result
    return found


@contextmanager
def _at_writing(folder: Path, during: list[list[str]]) -> Iterator[None]:
    """Record which folders are complete whenever pieces are written."""
    write_data = FileSystemWriter.write_data

    def write(self: Any, *args: Any) -> Any:
        during.append(sorted(p.name for p in folder.glob("*.ckpt") if (p / "meta.pt").is_file()))
        return write_data(self, *args)

    with replaced(FileSystemWriter, "write_data", write):
        yield


class _Score(pl.Callback):
    """Reports a value that falls and rises."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        scores = [5.0, 3.0, 4.0, 1.0, 2.0, 0.0]
        trainer.callback_metrics["score"] = torch.tensor(scores[trainer.global_step - 1])


def _step_of(folder: Path) -> int:
    return torch.load(folder / "meta.pt", weights_only=False)["global_step"]


def meanwhile(directory: str, strategies: list[str]) -> dict[str, Any]:
    """Whether steps are made while a folder is written: the thread writes no byte before the run is two steps further."""
    quiet()
    found: dict[str, Any] = {}
    for strategy in strategies:
        further, waited = threading.Event(), list[bool]()
        write_data = FileSystemWriter.write_data

        def write_later(
            self: Any, *args: Any, further: Any = further, waited: Any = waited, do: Any = write_data
        ) -> Any:
            waited.append(further.wait(60))
            return do(self, *args)

        class Further(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, further: Any = further) -> None:
                if trainer.global_step == 4:
                    further.set()

        path = Path(directory, strategy)
        with replaced(FileSystemWriter, "write_data", write_later):
            fit(strategy, callbacks=[SaveAt(path, [2]), Further()])
        alive = [t.name for t in threading.enumerate() if t.name.startswith("lightning_eff_checkpoints")]
        found[strategy] = everywhere([waited, _step_of(path / "2.ckpt"), alive])
    return found


def failures(directory: str, strategies: list[str]) -> dict[str, Any]:
    """What a run raises on each rank whose disk is full, what is left on the disk, and what a failing run does."""
    quiet()
    found: dict[str, Any] = {}
    for strategy in strategies:
        for name, at in {"next": [2, 3, 5], "end": [2, STEPS]}.items():
            for rank in (0, 1):
                folder = Path(directory, strategy, f"{name}{rank}")
                with _full_disk(rank, folder, at[1]):
                    result = _raised(strategy, [SaveAt(folder, at)])
                dist.barrier()
                result["folders"] = sorted(p.name for p in folder.iterdir())
                found[f"{strategy}, {name}, rank {rank}"] = everywhere(result)
        folder = Path(directory, strategy, "meta")
        with replaced(folders, "_put", _no_space) if dist.get_rank() == 0 else _nothing():
            result = _raised(strategy, [SaveAt(folder, [2])])
        dist.barrier()
        found[f"{strategy}, rename"] = everywhere({**result, "folders": sorted(p.name for p in folder.iterdir())})
        if strategy == "shard":  # which writes in the same way at once
            with replaced(folders, "_put", _no_space) if dist.get_rank() == 0 else _nothing():
                result = _raised(strategy, [SaveAt(folder, [3])], background=False)
            dist.barrier()
            result["folders"] = sorted(p.name for p in folder.iterdir())
            found[f"{strategy}, at once"] = everywhere(result)
        folder = Path(directory, strategy, "older")
        with _full_disk(1, folder, 4):
            keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2)
            result = _raised(strategy, [keep], enable_checkpointing=True)
        dist.barrier()
        found[f"{strategy}, older"] = everywhere({**result, "folders": sorted(p.name for p in folder.iterdir())})
        folder = Path(directory, strategy, "remove")
        keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2)
        with replaced(TorchCheckpointIO, "remove_checkpoint", _no_space):
            result = _raised(strategy, [keep], enable_checkpointing=True)
        dist.barrier()
        found[f"{strategy}, remove"] = everywhere({**result, "folders": sorted(p.name for p in folder.iterdir())})
        folder = Path(directory, strategy, "step")
        with replaced(writer, "one_thread", Late):
            result = _raised(strategy, [SaveAt(folder, [2]), _Fails(3)])
        dist.barrier()
        found[f"{strategy}, step"] = everywhere({**result, "folders": sorted(p.name for p in folder.iterdir())})
    return found


def _raised(
    strategy: str, callbacks: Sequence[pl.Callback], *, background: bool = True, **settings: Any
) -> dict[str, Any]:
    plugins = [AsyncCheckpointIO()] if background else []
    net, t = made(strategy, ["ExactResume"], callbacks, plugins, **settings)
    own = set(vars(t.strategy))
    error = ""
    try:
        t.fit(net, loader("tiny_gpt", 40))
    except Exception as failed:
        error = f"{type(failed).__name__}: {failed}"
    ours = {"save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown"} & (set(vars(t.strategy)) - own)
    alive = [th.name for th in threading.enumerate() if th.name.startswith("lightning_eff_checkpoints")]
    return {"error": error, "step": t.global_step, "left": sorted(ours), "alive": alive}


def _no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _full_disk(rank: int, folder: Path, step: int) -> Iterator[None]:
    """Let one rank find its disk full when it writes the folder of ``step``."""
    write_data = FileSystemWriter.write_data

    def write(self: Any, *args: Any) -> Any:
        if dist.get_rank() == rank and f"{step}.ckpt" in str(self.path):
            _no_space()
        return write_data(self, *args)

    with replaced(FileSystemWriter, "write_data", write):
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Fails(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise ArithmeticError("the run failed")


def others(directory: str) -> dict[str, Any]:
    """Checkpoints in one file under FSDP2, saves before a job is requeued, after the fit, over other ones, and FSDP1's."""
    quiet()
    found: dict[str, Any] = {}
    here = Path(directory)

    path = here / "one.ckpt"
    with replaced(AsyncCheckpointIO, "_ensure_setup", _late_files):
        fit("fsdp2 file", callbacks=[SaveAt(here, [2], "one.ckpt")])
    dist.barrier()
    found["file"] = torch.load(path, weights_only=False)["global_step"] if path.is_file() else None
    result: dict[str, Any] = {}
    with replaced(torch, "save", _no_space):
        result = _raised("fsdp2 file", [SaveAt(here, [2], "never.ckpt")])
    found["failing file"] = everywhere(result)

    for strategy in ("fsdp2", "shard"):
        seen: list[bool] = []

        class Look(pl.Callback):
            def on_train_batch_end(
                self, trainer: pl.Trainer, *args: Any, name: str = strategy, seen: Any = seen
            ) -> None:
                dist.barrier()
                seen.append((here / name / "hpc_ckpt_1.ckpt" / "meta.pt").is_file())
                dist.barrier()

        with replaced(writer, "one_thread", Late):
            _, t = fit(strategy, callbacks=[SaveAt(here / strategy, [2], "hpc_ckpt_1.ckpt"), Look()])
        found[f"{strategy}, requeued"] = seen
        if strategy == "shard":
            t.save_checkpoint(here / "after.ckpt")
            found["after"] = (here / "after.ckpt" / "meta.pt").is_file()

        over = here / strategy / "over.ckpt"  # a link to an older folder, which stays, then the folder itself
        (here / strategy / "older").mkdir(exist_ok=True)
        if dist.get_rank() == 0:
            over.symlink_to("older")
        dist.barrier()
        fit(strategy, callbacks=[SaveAt(here / strategy, [2, 3], "over.ckpt")])
        dist.barrier()
        found[f"{strategy}, over"] = [_step_of(over), over.is_symlink(), [*(here / strategy / "older").iterdir()] == []]
    found["flat"] = everywhere(_flat_shards(here))
    return found


def _late_files(io: Any) -> None:
    from tests.runs import _Later

    if io._executor is None:
        io._executor = _Later()


class _Flat(FSDPStrategy):
    """Lightning's strategy, of which no run is possible on CPUs, as it is within one."""

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj


def _flat_shards(here: Path) -> list[str]:
    """The places that differ in a state of FSDP1 that is saved at once, and late, when the parameters have changed."""
    torch.manual_seed(0)
    net = FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)

    def step() -> None:
        net(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()

    def checkpoint() -> dict[str, Any]:
        kinds = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
        with FullyShardedDataParallel.state_dict_type(net, StateDictType.SHARDED_STATE_DICT, *kinds):
            states = [FullyShardedDataParallel.optim_state_dict(net, optimizer)]
            return {
                "state_dict": net.state_dict(),
                "optimizer_states": states,
                "global_step": steps,
                "more": [*range(60)],
            }

    strategy, steps = _Flat(state_dict_type="sharded", checkpoint_io=AsyncCheckpointIO()), 1
    step()
    strategy.save_checkpoint(checkpoint(), here / "now")
    patches = Patches()
    saves = LightningSaves(SimpleNamespace(strategy=strategy, checkpoint_callbacks=[]))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    saves.begin(patches)
    with replaced(writer, "one_thread", Late):
        strategy.save_checkpoint(checkpoint(), here / "late")
        step()
        saves.close()
    patches.restore()
    steps = 2
    strategy.save_checkpoint(checkpoint(), here / "later")
    dist.barrier()
    assert len(_differing(here / "now", here / "later")) > 10, "nothing changed"
    state = checkpoint()["state_dict"]
    copied = staged(state)
    for key, value in state.items():
        for shard, copy in zip(value.local_shards(), copied[key].local_shards(), strict=True):
            before = shard.tensor.clone()
            shard.tensor.add_(1)
            assert torch.equal(copy.tensor, before), "a shard was not copied"
    return _differing(here / "now", here / "late")
