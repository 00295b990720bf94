"""A run as techniques see it: what it refuses and puts back, which blocks run, and that tuners train plainly."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor

import lightning_eff
from lightning_eff import LatestWeightAveraging, ProgressiveLayerDropping, ProgressiveStacking
from lightning_eff._core import session as sessions
from lightning_eff._core.progress import mend_loops
from lightning_eff._core.steps import Stage
from lightning_eff._core.technique import Technique
from tests.cases import CASES, MISSING
from tests.core.nop import Nop, Other
from tests.models import TinyClassifier, TinyGPT, flat, loader, trainer
from tests.runs import Interrupt, checkpoints, differences, final_state, fit


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
    with pytest.raises(RuntimeError, match="Looks is not attached to a run"):
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
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `Nop`"):
        trainer(Nop(), Nop(), max_steps=1)


def test_a_run_without_end_is_refused_where_the_budget_counts() -> None:
    class Scheduled(Nop):
        needs_budget = True

    t = trainer(Scheduled(), max_steps=-1, max_epochs=-1)
    with pytest.raises(ValueError, match=r"Scheduled: the Trainer has no end .* Set one of max_steps"):
        t.fit(TinyClassifier(), loader("classifier"))


STEERING = sorted(name for name in CASES if getattr(lightning_eff, name).needs_optimizer)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("name", STEERING)
def test_a_module_without_an_optimizer_is_refused_where_that_is_steered(name: str) -> None:
    net = TinyClassifier()
    net.configure_optimizers = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    case = CASES[name]
    with pytest.raises(
        ValueError, match=f"{name}: TinyClassifier.configure_optimizers returned no optimizer.*Return an"
    ):
        trainer((case.on_classifier or case.active)(), max_steps=2).fit(net, loader("classifier", 200))


def test_those_that_steer_optimizers_say_so() -> None:
    assert {"BatchSizeWarmup", "LearningRateSchedule", "LookSAM", "Lookahead", "ScheduleFree"} <= {*STEERING, *MISSING}


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
    mend_loops(checkpoint, by_steps=True, accumulate=1)
    assert {key: fit_loop[key] for key in progress} == before
    mend_loops({}, by_steps=True, accumulate=1)


def test_a_run_that_is_interrupted_at_the_end_of_two_epochs_counts_all(tmp_path: Path) -> None:
    """Five batches an epoch: resumed from the end of the first one, interrupted at that of the second, and resumed."""
    _, whole = fit("tiny_gpt", lambda: [Nop()], directory=tmp_path)
    saved = checkpoints(tmp_path)
    stop = Interrupt(tmp_path / "again.ckpt", step=10)
    fit("tiny_gpt", lambda: [Nop()], resume=saved[4], callbacks=[stop])
    undisturbed, again = (
        torch.load(path, weights_only=True)["loops"]["fit_loop"]["epoch_progress"] for path in (saved[9], stop.path)
    )
    assert again == undisturbed
    _, last = fit("tiny_gpt", lambda: [Nop()], resume=stop.path)
    assert last.current_epoch == whole.current_epoch


def test_another_number_of_replicas_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit("tiny_gpt", lambda: [Nop()], directory=tmp_path)
    path = checkpoints(tmp_path)[3]
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["lightning_eff"]["rng"] *= 2
    checkpoint["lightning_eff"]["layout"]["replicas"] = [0, 1]
    torch.save(checkpoint, path)
    with caplog.at_level("INFO"):
        fit("tiny_gpt", lambda: [Nop()], resume=path)
    assert "divided its samples over 2 processes, and this run divides them over 1" in caplog.text


def test_blocks_built_late_are_found() -> None:
    found: list[int] = []

    class Finds(Nop):
        def on_model(self, session: Any) -> None:
            found.append(len(session.stack(None, who="Finds")))

    for built in ("init", "setup", "configure_model"):
        found.clear()
        trainer(Finds(), max_steps=1).fit(TinyGPT(built=built), loader("tiny_gpt"))
        assert found == [4], built


# -- which blocks run


def run_watched(net: Any, *callbacks: pl.Callback, **kwargs: Any) -> dict[str, list[Any]]:
    """The signature within each ``training_step`` and ``validation_step`` and before each batch, and the blocks called."""
    found: dict[str, list[Any]] = {"training": [], "validation": [], "called": [], "before": []}
    technique = next(c for c in callbacks if isinstance(c, Technique))
    called: list[int] = []
    for i, block in enumerate(net.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: called.append(i))
    for name in ("training", "validation"):
        step = getattr(net, f"{name}_step")

        def own(batch: Any, batch_idx: int, name: str = name, step: Any = step) -> Any:
            called.clear()
            found[name].append(technique.session.signature())
            output = step(batch, batch_idx)
            found["called"].append((name, len(called)))
            return output

        setattr(net, f"{name}_step", own)

    class Before(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            found["before"].append(technique.session.signature())

    pl.seed_everything(0, verbose=False)
    settings = {"max_steps": 12, "limit_val_batches": 1, "val_check_interval": 2, **kwargs}
    trainer(*callbacks, Before(), **settings).fit(net, loader("tiny_gpt"), loader("tiny_gpt", 4))
    return found


def test_signature_without_blocks_is_empty() -> None:
    found = run_watched(TinyGPT(), Nop())
    assert set(found["training"]) == set(found["validation"]) == {()}


def test_signature_tells_the_blocks_that_a_step_with_dropping_runs() -> None:
    found = run_watched(TinyGPT(), ProgressiveLayerDropping(theta_min=0.2))
    called = [n for name, n in found["called"] if name == "training"]
    assert found["training"] == [(("blocks", n, n),) for n in called]
    assert len(set(called)) > 1, "no step dropped anything"
    assert set(found["validation"]) == set(found["before"]) == {(("blocks", 4, 4),)}
    assert {n for name, n in found["called"] if name == "validation"} == {4}


def test_signature_in_passes_over_training_data_is_that_of_evaluation() -> None:
    """A mean of weights takes its BatchNorm statistics from passes that show all blocks, whatever the step dropped."""
    net = TinyGPT()
    net.register_module("statistics", torch.nn.BatchNorm1d(61))
    forward = net.forward
    net.forward = lambda ids: net.statistics(forward(ids).flatten(0, 1)).unflatten(0, ids.shape)  # type: ignore[method-assign]
    averaging = LatestWeightAveraging(interval=2, bn_batches=1)
    found = run_watched(net, ProgressiveLayerDropping(theta_min=0.2), averaging)
    called = [n for name, n in found["called"] if name == "training"]
    assert len(called) > 12, "no pass over training data"
    assert found["training"] == [(("blocks", n, n),) for n in called]


def test_signature_follows_growth_and_is_hashable() -> None:
    found = run_watched(TinyGPT(), ProgressiveStacking(stages=[(0.0, 1), (0.25, 2), (0.5, 4)]))
    expected = [(("blocks", n, n),) for n in [1] * 3 + [2] * 3 + [4] * 6]
    assert found["training"] == found["before"] == expected
    assert len({hash(signature) for signature in found["training"]}) == 3
    assert [n for name, n in found["called"] if name == "training"] == [1] * 3 + [2] * 3 + [4] * 6
    assert (("blocks", 1, 1),) in found["validation"] and found["validation"][-1] == (("blocks", 4, 4),)


def test_signature_counts_those_that_take_gradients() -> None:
    net: Any = TinyGPT()
    net.blocks[0].requires_grad_(False)
    net.blocks[1].norm1.requires_grad_(False)  # the rest of it trains
    found = run_watched(net, ProgressiveStacking(stages=[(0.0, 3)]))
    assert set(found["training"]) == {(("blocks", 3, 2),)}


def test_signature_has_every_stack_by_path() -> None:
    class TwoStacks(Nop):
        def on_model(self, session: Any) -> None:
            for layers in ("blocks", "after"):
                session.stack(layers, who="TwoStacks")

    net = TinyGPT()
    net.register_module("after", torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3)))
    found = run_watched(net, TwoStacks(), max_steps=1)
    assert found["training"] == [(("after", 3, 3), ("blocks", 4, 4))]
