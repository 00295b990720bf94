"""Loaders with their own state resume with the batches that were to come, whatever is behind them and in between."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchdata.nodes as tn
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import RandomSampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_eff import BatchSizeWarmup, ExactResume
from tests import processes
from tests.cases import case_of
from tests.core.streams import KINDS, LITDATA, SIZE, Forgetful, Rows, Stream, Touchy, litdatas, mixed_nodes, nodes
from tests.core.test_loaders import Recorder
from tests.models import flat, module, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated",
    "ignore:Your `IterableDataset` has `__len__`",
    "ignore:The given buffer is not writable",  # litdata's
    "ignore:This checkpoint is saved in on_train_batch_start",
)

OTHER = "does not repeat the batches"


@pytest.fixture(params=[*KINDS, *LITDATA])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A function that makes a loader, as a new process would."""
    return KINDS[request.param] if request.param in KINDS else LITDATA[request.param](tmp_path)


def run(make: Any, *callbacks: pl.Callback, resume: Path | None = None, **settings: Any) -> Recorder:
    pl.seed_everything(3 if resume is None else 44, verbose=False)
    net = Recorder()
    t = trainer(*callbacks, **{"max_steps": 13, "max_epochs": -1, **settings})
    t.fit(net, make(), ckpt_path=resume)
    return net


def saver(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")


def check(whole: Recorder, resumed: Recorder, trained: int, *, weights: bool = True) -> None:
    assert len(resumed.seen) == len(whole.seen) - trained, trained
    for i, (a, b) in enumerate(zip(whole.seen[trained:], resumed.seen, strict=True)):
        assert torch.equal(a, b), f"from batch {trained}, batch {i} after it: {a[:, 0].tolist()}, {b[:, 0].tolist()}"
    assert not weights or torch.equal(whole.weight, resumed.weight), trained


class Saves(pl.Callback):
    """Saves a checkpoint in each call of a hook, numbered."""

    def __init__(self, hook: str, folder: Path) -> None:
        self.count = 0

        def save(trainer: pl.Trainer, *_: Any) -> None:
            self.count += 1
            trainer.save_checkpoint(folder / f"{self.count}.ckpt")

        setattr(self, hook, save)


def test_batches_are_plain_lightnings_and_a_resumed_run_goes_on_with_them(make: Any, tmp_path: Path) -> None:
    plain = run(make)
    whole = run(make, ExactResume(), saver(tmp_path), enable_checkpointing=True)
    check(plain, whole, 0)
    for step in (1, 2, 3, 5, 6, 9):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=f".*{OTHER}")
            check(whole, run(make, ExactResume(), resume=tmp_path / f"step={step}.ckpt"), step)


@pytest.mark.parametrize("limit", [1.0, 3])
def test_a_resumed_run_goes_on_within_a_window_of_accumulation_and_after_a_validation(
    make: Any, limit: float, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also where epochs end before the loader does."""
    if limit == 3 and "forgetful" in request.node.name:
        pytest.skip("its state does not say that an epoch was cut short")
    if limit == 3 and "own generator" in request.node.name:
        pytest.skip("whether its thread has drawn another order when an epoch is cut short depends on its speed")
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_steps": 6, "limit_train_batches": limit}
    validation = {"val_check_interval": 2, "check_val_every_n_epoch": None, "limit_val_batches": 1}

    def fit(*callbacks: pl.Callback, resume: Path | None = None, enable_checkpointing: bool = False) -> Recorder:
        pl.seed_everything(3 if resume is None else 44, verbose=False)
        net = Recorder()
        net.validation_step = lambda batch, batch_idx: torch.rand(())  # pyright: ignore[reportAttributeAccessIssue]
        t = trainer(*callbacks, max_epochs=-1, enable_checkpointing=enable_checkpointing, **{**settings, **validation})
        t.fit(net, make(), nodes(), ckpt_path=resume)
        return net

    whole = fit(ExactResume(), Saves("on_train_batch_end", tmp_path), enable_checkpointing=True)
    for trained in (1, 3, 4, 7):
        check(whole, fit(ExactResume(), resume=tmp_path / f"{trained}.ckpt"), trained)


def test_a_checkpoint_within_a_step_trains_on_its_batch_again(make: Any, tmp_path: Path) -> None:
    """Lightning may have fetched the one after it, too; the last batch of an epoch is not lost either."""
    whole = run(make, ExactResume(), Saves("on_train_batch_start", tmp_path), enable_checkpointing=True)
    for number in (1, 2, 5, 6, 9):
        resumed = run(make, ExactResume(), resume=tmp_path / f"{number}.ckpt")
        check(whole, resumed, number - 1)


def test_a_state_that_is_not_enough_is_replaced_by_the_epoch_from_its_beginning(tmp_path: Path) -> None:
    run(Forgetful, ExactResume(), saver(tmp_path), enable_checkpointing=True)
    for step, read in ((8, [2]), (9, [2, 0, 1, 2, 3])):  # of each epoch's 5 batches; states lead to an even one
        found: list[int] = []
        run(lambda found=found: Forgetful(found), ExactResume(), resume=tmp_path / f"step={step}.ckpt", max_steps=10)
        assert found == [*read, *range(step - 5, 5)], step


def test_a_state_that_is_enough_is_not_asked_for_before_it_is_used(tmp_path: Path) -> None:
    """So that the epoch is not read again."""
    whole = run(Touchy, ExactResume(), saver(tmp_path), enable_checkpointing=True)
    found: list[int] = []
    check(whole, run(lambda: Touchy(found), ExactResume(), resume=tmp_path / "step=9.ckpt"), 9)
    assert found == [3, 4, 0, 1, 2]


def test_orders_that_nothing_determines_are_not_resumed_in_silence(tmp_path: Path) -> None:
    """Samplers that draw from the global state whenever a data set ends, while training draws from it."""
    make = lambda: mixed_nodes(seeded=False)  # noqa: E731
    run(make, ExactResume(), saver(tmp_path), enable_checkpointing=True)
    with pytest.warns(UserWarning, match=f"Loader: the training loader {OTHER}"):
        run(make, ExactResume(), resume=tmp_path / "step=3.ckpt")


def test_a_state_that_no_checkpoint_can_hold_is_refused() -> None:
    class Unsaved(Forgetful):
        def state_dict(self) -> dict[str, Any]:
            return {"read": lambda: self.read}

    with pytest.raises(ValueError, match=r"Unsaved: state_dict\(\) of the training loader returns a value that cannot"):
        run(Unsaved, ExactResume())


def test_a_class_derived_from_torchdatas_is_resumed_as_that_is(tmp_path: Path) -> None:
    """As torchtitan's, which packs the state by rank."""

    class Packing(StatefulDataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {"rank 0": super().state_dict()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict["rank 0"])

    def make() -> Packing:
        return Packing(Stream(Rows(noise=True)), 4)

    whole = run(make, ExactResume(), saver(tmp_path), enable_checkpointing=True)
    check(run(make), whole, 0)
    for step in (2, 5, 6):
        check(whole, run(make, ExactResume(), resume=tmp_path / f"step={step}.ckpt"), step)


def loaders_of(model: str) -> dict[str, Any]:
    rows = Rows(model=model)
    return {
        "map": lambda: StatefulDataLoader(rows, 4, shuffle=True),
        "stream": lambda: StatefulDataLoader(Stream(rows), 4),
        "nodes": lambda: nodes(rows, RandomSampler(rows), threads=1, ahead=2),
    }


BY_BATCH = [
    "SequencePacking",
    "SelectiveBackprop",
    "OrderedSGD",
    "ImportanceSampling",
    "AutoAssist",
    "BatchSizeWarmup",
    "BatchSizeWarmup by batch",
    "LoaderTuning",
    "SequenceLengthWarmup",
]
BY_SAMPLE = [
    "TokenBudgetBatches",
    "DataPruning",
    "SampleSubset",
    "DifficultyPacing",
    "RobustImportanceSampling",
    "RHOLoss",
]


def active(name: str) -> Any:
    return BatchSizeWarmup(full=2, until=0.5, by="batch") if name.endswith("batch") else case_of(name).active()


@pytest.mark.parametrize("kind", ["map", "stream", "nodes", "litdata"])
@pytest.mark.parametrize("name", [*BY_BATCH, *BY_SAMPLE])
def test_techniques_resume_or_refuse_at_the_start(name: str, kind: str, tmp_path: Path) -> None:
    """Those that choose samples by their index need a data set with indices, and say so."""
    model = case_of(name.split()[0]).model
    make = litdatas(tmp_path, Rows(model=model)) if kind == "litdata" else loaders_of(model)[kind]

    def fit(*callbacks: pl.Callback, resume: Path | None = None) -> torch.Tensor:
        pl.seed_everything(3 if resume is None else 44, verbose=False)
        net = module(model)
        t = trainer(active(name), *callbacks, max_steps=7, max_epochs=-1, enable_checkpointing=bool(callbacks))
        t.fit(net, make(), ckpt_path=resume)
        return flat(net)

    if name in BY_SAMPLE and kind != "map":
        reason = "does not say which samples a batch has" if name == "RHOLoss" else "samples cannot be chosen by index"
        with pytest.raises(ValueError, match=reason):
            fit()
        return
    whole = fit(Saves("on_train_batch_end", tmp_path))
    for trained in (1, 3, 5, 6):
        assert torch.equal(whole, fit(resume=tmp_path / f"{trained}.ckpt")), trained


def test_two_processes_resume_each_with_its_part_of_the_stream() -> None:
    result = processes.launch("tests.core.stream_jobs")
    for kind, ranks in result.items():
        for rank, found in enumerate(ranks):
            assert found["same"], f"{kind}, rank {rank}"
        assert ranks[0]["samples"] and not {*ranks[0]["samples"]} & {*ranks[1]["samples"]}, kind
        assert ranks[0]["weights"] == ranks[1]["weights"], kind


def test_the_threads_of_nodes_end_with_their_iteration() -> None:
    """Lightning begins one more to check the loader, whose threads would draw random numbers beside the next one's."""
    loader = nodes(threads=1, ahead=2)
    run(lambda: loader, ExactResume(), max_steps=2)
    assert isinstance(loader.root, tn.Prefetcher) and loader.restart_on_stop_iteration
    assert sum(len(batch) for batch in loader) == SIZE  # it can be used again


def test_noise_that_nodes_draw_in_threads_is_not_resumed_in_silence(tmp_path: Path) -> None:
    """In threads that race for torch's generator, a batch may happen to be the same, so the noise here has no seed."""

    def make() -> tn.Loader[Any]:
        rows = Rows(noise="unseeded")
        node = tn.ParallelMapper(tn.SamplerWrapper(RandomSampler(rows)), rows.__getitem__, num_workers=2)
        return tn.Loader(tn.Mapper(tn.Batcher(node, 4), default_collate))

    run(make, ExactResume(), saver(tmp_path), enable_checkpointing=True)
    with pytest.warns(UserWarning, match=OTHER):
        run(make, ExactResume(), resume=tmp_path / "step=3.ckpt")
