"""A run as techniques see it: what it refuses, what it puts back, and that Lightning's tuners train plainly."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor

from lightning_eff._core import session as sessions
from lightning_eff._core.resume import mend_loops
from lightning_eff._core.steps import Stage
from tests.core.nop import Nop, Other
from tests.models import TinyClassifier, TinyGPT, flat, loader, trainer
from tests.runs import checkpoints, differences, final_state, fit


class Halving(Nop):
    """Halves the loss: what it does shows in every weight."""

    def attach(self, session: Any) -> None:
        session.chain.add(Stage.REWEIGHT, lambda step, batch, proceed: proceed(batch) / 2)


def test_one_session_for_all_techniques_and_none_afterwards() -> None:
    found = []

    class Looks(Nop):
        def on_batch_start(self, session: Any, batch: Any, batch_idx: int) -> None:
            found.append((session, [type(t) for t in session.techniques]))

    a, b = Looks(), Other()
    trainer(a, b, max_steps=2).fit(TinyClassifier(), loader("classifier"))
    assert {types[0] for _, types in found} == {Looks} and len({id(s) for s, _ in found}) == 1
    assert found[0][1] == [Looks, Other] and len(found) == 2, "the first technique drives the session, once a batch"
    assert len(sessions._OPEN) == 0
    with pytest.raises(RuntimeError, match="Looks is attached to no run"):
        _ = a.session


def test_a_refusal_leaves_nothing_changed() -> None:
    class Refuses(Other):
        def check(self, session: Any) -> None:
            raise ValueError("no")

    net = TinyClassifier()
    t = trainer(Nop(), Refuses(), max_steps=2)
    with pytest.raises(ValueError, match="no"):
        t.fit(net, loader("classifier"))
    assert not {"training_step", "validation_step", "configure_optimizers", "log"} & set(net.__dict__)
    assert not {"setup", "load_checkpoint", "process_dataloader"} & set(t.strategy.__dict__)
    assert len(sessions._OPEN) == 0


def test_same_technique_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="Nop and Nop cannot train together: the same technique twice"):
        trainer(Nop(), Nop(), max_steps=1).fit(TinyClassifier(), loader("classifier"))


def test_a_run_without_end_is_refused_where_the_budget_counts() -> None:
    class Scheduled(Nop):
        needs_budget = True

    t = trainer(Scheduled(), max_steps=-1, max_epochs=-1)
    with pytest.raises(ValueError, match=r"Scheduled: the Trainer has no end .* Set one of max_steps"):
        t.fit(TinyClassifier(), loader("classifier"))


def test_dataloader_iter_is_refused() -> None:
    class TakesIterator(TinyClassifier):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return self(batch[0]).sum()

    with pytest.raises(ValueError, match="training_step takes dataloader_iter; expected a batch"):
        trainer(Nop(), max_steps=1).fit(TakesIterator(), loader("classifier"))


def test_learning_rate_finder_trains_plainly() -> None:
    """Lightning's tuners replace the callbacks for their trial runs: techniques must sleep in those."""

    def suggest(*techniques: Nop) -> tuple[list[float], Tensor]:
        pl.seed_everything(0, verbose=False)
        finder = LearningRateFinder(num_training_steps=8, early_stop_threshold=None)
        net = TinyClassifier()
        t = trainer(*techniques, finder, max_steps=6, enable_checkpointing=True, default_root_dir=None)
        t.fit(net, loader("classifier", 40))
        assert finder.optimal_lr is not None
        return finder.optimal_lr.results["loss"], flat(net)

    plain, _ = suggest()
    ours, weights = suggest(Halving())
    assert plain == ours
    assert weights.isfinite().all()


def test_a_deep_copy_of_the_module_is_usable_afterwards() -> None:
    net = TinyClassifier()
    copies = []

    class Copies(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: pl.LightningModule, *args: Any) -> None:
            copies.append(copy.deepcopy(module.state_dict()))

    trainer(Halving(), Copies(), max_steps=2).fit(net, loader("classifier"))
    plain = copy.deepcopy(net)
    trainer(max_steps=2).fit(plain, loader("classifier"))
    assert not torch.equal(flat(plain), flat(net))
    assert len(copies) == 2


@pytest.mark.parametrize("stop", [3, 5, 7, 10])
def test_resume_from_a_run_that_max_steps_stopped(stop: int, tmp_path: Path) -> None:
    """Lightning alone counts the epoch as complete, or trains a batch of it again."""
    whole = final_state(*fit("tiny_gpt", lambda: [Nop()]))
    _, t = fit("tiny_gpt", lambda: [Nop()], max_steps=stop)
    t.save_checkpoint(tmp_path / "stopped.ckpt")
    assert differences(whole, final_state(*fit("tiny_gpt", lambda: [Nop()], resume=tmp_path / "stopped.ckpt"))) == []


@pytest.mark.parametrize("limit", [{"max_steps": 12}, {"max_steps": -1, "max_epochs": 3}])
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("validate", [False, True])
def test_resume_from_epoch_ends(limit: dict[str, int], at_end: bool, validate: bool, tmp_path: Path) -> None:
    """Checkpoints saved as an epoch or its validation ends, under either limit."""
    kwargs: dict[str, Any] = {**limit, **({"limit_val_batches": 2} if validate else {})}
    saver = ModelCheckpoint(
        tmp_path, every_n_epochs=1, save_top_k=-1, filename="{step}", save_on_train_epoch_end=at_end
    )
    whole = final_state(*fit("tiny_gpt", lambda: [Nop()], callbacks=[saver], enable_checkpointing=True, **kwargs))
    saved = checkpoints(tmp_path)
    assert saved or not (at_end or validate)
    for path in saved[:-1]:  # from the last one there is nothing left to do
        assert differences(whole, final_state(*fit("tiny_gpt", lambda: [Nop()], resume=path, **kwargs))) == [], path


def test_mend_loops_leaves_a_checkpoint_of_a_batch_end_alone(tmp_path: Path) -> None:
    fit("tiny_gpt", lambda: [Nop()], directory=tmp_path)
    checkpoint = torch.load(checkpoints(tmp_path)[3], weights_only=True)
    fit_loop = checkpoint["loops"]["fit_loop"]
    progress = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict")
    before = copy.deepcopy({key: fit_loop[key] for key in progress})
    mend_loops(checkpoint, by_steps=True)
    assert {key: fit_loop[key] for key in progress} == before
    mend_loops({}, by_steps=True)


def test_another_world_size_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit("tiny_gpt", lambda: [Nop()], directory=tmp_path)
    path = checkpoints(tmp_path)[3]
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["lightning_eff"]["rng"] *= 2
    torch.save(checkpoint, path)
    with caplog.at_level("INFO"):
        fit("tiny_gpt", lambda: [Nop()], resume=path)
    assert "The checkpoint is of 2 processes and this run has 1" in caplog.text


def test_blocks_built_late_are_found() -> None:
    found: list[int] = []

    class Finds(Nop):
        def on_model(self, session: Any) -> None:
            found.append(len(session.stack(None, who="Finds")))

    for built in ("init", "setup", "configure_model"):
        found.clear()
        trainer(Finds(), max_steps=1).fit(TinyGPT(built=built), loader("tiny_gpt"))
        assert found == [4], built
