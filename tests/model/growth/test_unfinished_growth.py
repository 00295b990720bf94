"""A stacking run that ends before all blocks run: what is said of it, and the plain module that it leaves."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ModelSummary
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn

from lightning_eff import LatestWeightAveraging, ProgressiveLayerDropping, ProgressiveStacking, export
from lightning_eff.model.growth._identity import used_outside
from lightning_eff.model.growth._shallower import Shallower
from tests.models import Block, HuggingFace, TinyGPT, flat, hugging_face, loader, make_batch, module, trainer
from tests.runs import checkpoints, differences, final_state, fit, resume_from_every_step

STAGES = [(0.0, 1), (0.25, 2), (0.5, 4)]
EARLY = "The fit ended before all blocks ran"
MODELS = ["tiny_gpt", "gpt2", "llama", "vit"]


class Stops(pl.Callback):
    """Ends the fit at a step: by a stop, or by raising."""

    def __init__(self, at: int = 4, raises: BaseException | None = None) -> None:
        self.at, self.raises = at, raises

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step >= self.at:
            if self.raises is not None:
                raise self.raises
            trainer.should_stop = True


def stacking(**kwargs: Any) -> ProgressiveStacking:
    return ProgressiveStacking(**{"stages": STAGES, **kwargs})


def loss_of(net: Any, name: str, *callbacks: pl.Callback, path: Path | None = None) -> float:
    t = trainer(*callbacks, limit_val_batches=1.0)
    return t.validate(net, loader(name, 8, shuffle=False, seed=5), verbose=False, ckpt_path=path)[0]["val_loss"]


# -- what is said


def test_an_early_end_is_warned_of_and_the_checkpoint_says_it(tmp_path: Path) -> None:
    technique = stacking()
    with pytest.warns(
        UserWarning, match=rf"{EARLY}.*only the first 2 of the 4 blocks of 'blocks' were trained.*finish='id"
    ):
        net, t = fit("tiny_gpt", lambda: [technique], callbacks=[Stops()])
    assert loss_of(net, "tiny_gpt") != loss_of(net, "tiny_gpt", technique)  # which is why
    with pytest.warns(
        UserWarning, match=r"before all blocks run.*first 2 of the 4 blocks.*\['callbacks'\]\['ProgressiveStacking'\]"
    ):
        t.save_checkpoint(tmp_path / "early.ckpt")
    state = torch.load(tmp_path / "early.ckpt", weights_only=True)["callbacks"]["ProgressiveStacking"]
    assert state["note"].startswith(
        "ProgressiveStacking: only the first 2 of the 4 blocks of 'blocks' were trained; the"
    )


def test_a_run_that_saves_at_each_step_is_warned_once_and_told_nothing_at_full_depth(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    fit("tiny_gpt", lambda: [stacking()], directory=tmp_path)
    told = [
        str(w.message) for w in recwarn if "saved before all blocks run" in str(w.message) or EARLY in str(w.message)
    ]
    assert len(told) == 1 and "first 1 of the 4" in told[0]
    notes = [
        torch.load(path, weights_only=True)["callbacks"]["ProgressiveStacking"].get("note")
        for path in checkpoints(tmp_path)
    ]
    assert [note is not None for note in notes] == [True] * 6 + [False] * 6


@pytest.mark.parametrize("how", [RuntimeError("planted"), KeyboardInterrupt(), "max_time", "early_stopping", "depth"])
def test_it_is_warned_of_however_the_run_ends(how: Any) -> None:
    def run() -> None:
        if how == "depth":  # the stages themselves end below it
            fit("tiny_gpt", lambda: [ProgressiveStacking(stages=[(0.0, 1), (0.5, 2)])])
        elif how == "max_time":
            fit("tiny_gpt", lambda: [stacking()], max_steps=-1, max_time={"seconds": 3600}, callbacks=[Stops()])
        elif how == "early_stopping":
            stop = EarlyStopping("val_loss", patience=1, min_delta=100.0)
            fit("tiny_gpt", lambda: [stacking()], callbacks=[stop], limit_val_batches=1, val_check_interval=2)
        else:
            fit("tiny_gpt", lambda: [stacking()], callbacks=[Stops(raises=how)])

    with pytest.warns(UserWarning, match=EARLY):
        try:
            run()
        except (RuntimeError, SystemExit) as error:
            assert isinstance(error, SystemExit) or "planted" in str(error)


def test_a_run_that_never_began_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(ValueError, match="keeps no state"):
        t = trainer(stacking(stages=[(0.0, 1), (0.5, 3)]), max_steps=4)
        t.fit(module("classifier", momentum=0.0), loader("classifier"))
    assert not [w for w in recwarn if EARLY in str(w.message)]


def test_the_control_says_it_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit("tiny_gpt", lambda: [Shallower(kept=lambda n: n / 2)])
    assert "Shallower: only the first 2 of the 4 blocks of 'blocks' were trained; the others have" in caplog.text


# -- finish="identity"


@pytest.mark.parametrize("name", MODELS)
def test_the_plain_module_is_what_was_trained(name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    technique = stacking(finish="identity")
    net, t = fit(name, lambda: [technique], callbacks=[Stops()])
    assert technique.report()["layers_active"] == 2
    under = loss_of(net, name, technique)
    assert loss_of(net, name) == pytest.approx(under, abs=1e-6)
    t.save_checkpoint(tmp_path / "end.ckpt")
    plain = module(name)
    plain.load_state_dict(torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"])
    assert loss_of(plain, name) == pytest.approx(under, abs=1e-6)
    assert not [w for w in recwarn if EARLY in str(w.message) or "saved before all blocks run" in str(w.message)]
    other, _ = fit(name, lambda: [stacking()], callbacks=[Stops()])
    assert abs(loss_of(other, name) - under) > 1e-4, "without it, the plain module is another one"
    assert loss_of(other, name, stacking(), path=tmp_path / "end.ckpt") == pytest.approx(under, abs=1e-6)


def test_every_checkpoint_is_right_in_the_plain_module_and_resumes_exactly(tmp_path: Path) -> None:
    build = lambda: [stacking(finish="identity")]  # noqa: E731
    assert resume_from_every_step("tiny_gpt", build, tmp_path) == {}
    for path in checkpoints(tmp_path)[:7]:
        under = loss_of(TinyGPT(), "tiny_gpt", stacking(), path=path)
        plain = TinyGPT()
        plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        assert loss_of(plain, "tiny_gpt") == pytest.approx(under, abs=1e-6), path.name


@pytest.mark.parametrize("init", ["stack", "identity"])
def test_training_is_the_same_with_and_without_it(init: str) -> None:
    with_it = final_state(*fit("gpt2", lambda: [stacking(finish="identity", init=init)]))
    without = final_state(*fit("gpt2", lambda: [stacking(init=init)]))
    assert differences(with_it, without) == []


@pytest.mark.parametrize("raises", [None, RuntimeError("planted"), KeyboardInterrupt()])
def test_however_the_run_ends(raises: BaseException | None, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="at", save_on_exception=True, every_n_train_steps=100)
    pl.seed_everything(1, verbose=False)
    net = TinyGPT()
    t = trainer(stacking(finish="identity"), Stops(raises=raises), saving, max_steps=12, enable_checkpointing=True)
    try:
        t.fit(net, loader("tiny_gpt"))
    except (RuntimeError, SystemExit):
        state = torch.load(tmp_path / "at.ckpt", weights_only=True)["state_dict"]
        assert all(torch.equal(state[key], value) for key, value in net.state_dict().items())
    with torch.no_grad():
        ids = make_batch("tiny_gpt")["input_ids"]
        net.eval()
        whole = net(ids)
        assert net.blocks is not None
        net.blocks = net.blocks[:2]
        assert torch.equal(whole, net(ids))


def test_a_depth_that_the_stages_never_reach() -> None:
    net, _ = fit("gpt2", lambda: [ProgressiveStacking(stages=[(0.0, 1), (0.5, 3)], finish="identity")])
    under = loss_of(net, "gpt2", Shallower(kept=lambda n: 3))
    assert loss_of(net, "gpt2") == pytest.approx(under, abs=1e-6)


def test_a_run_takes_it_up_or_leaves_it_on_the_way(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    fit("tiny_gpt", lambda: [stacking()], directory=tmp_path / "without")
    net, _ = fit(
        "tiny_gpt",
        lambda: [stacking(finish="identity")],
        resume=checkpoints(tmp_path / "without")[1],
        callbacks=[Stops()],
    )
    under = loss_of(net, "tiny_gpt", Shallower(kept=lambda n: 2))
    assert loss_of(net, "tiny_gpt") == pytest.approx(under, abs=1e-6)
    fit("tiny_gpt", lambda: [stacking(finish="identity")], directory=tmp_path / "with")
    recwarn.clear()
    fit("tiny_gpt", lambda: [stacking()], resume=checkpoints(tmp_path / "with")[1], callbacks=[Stops()])
    assert not [w for w in recwarn if EARLY in str(w.message)], "the blocks hand their input on all the same"


def test_averaged_weights_are_right_in_the_plain_module_too() -> None:
    technique = stacking(finish="identity")
    net, _ = fit("tiny_gpt", lambda: [LatestWeightAveraging(window=3, interval=1), technique], callbacks=[Stops(5)])
    under = loss_of(net, "tiny_gpt", technique)
    assert loss_of(net, "tiny_gpt") == pytest.approx(under, abs=1e-6)


def test_blocks_that_cannot_be_identities_are_refused_on_the_first_batch() -> None:
    net = module("bert")
    before = flat(net)
    with pytest.raises(
        ValueError, match=r"finish='identity'\): .*BertLayer.*not a pre-norm residual block.*Use finish=None"
    ):
        trainer(stacking(finish="identity"), max_steps=12).fit(net, loader("bert"))
    assert torch.equal(flat(net), before)


def test_a_step_that_takes_more_from_its_blocks_than_their_hidden_state_is_refused() -> None:
    class Penalizes(TinyGPT):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            x = self.embed(batch["input_ids"])
            for block in self.blocks or ():
                x = block(x)
            return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten()) * len(self.blocks or ())

    net = Penalizes()
    before = flat(net)
    with pytest.raises(ValueError, match=r"finish='identity'\): the loss of the first batch is .* with the 1 blocks"):
        trainer(stacking(finish="identity"), max_steps=12).fit(net, loader("tiny_gpt"))
    assert torch.equal(flat(net), before)


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"finish='zero'\): expected 'identity', or None"):
        ProgressiveStacking(finish="zero")

    class Manual(TinyGPT):
        automatic_optimization = False

    with pytest.raises(ValueError, match=r"finish='identity'\): Manual has automatic_optimization=False"):
        trainer(stacking(finish="identity"), max_steps=2).fit(Manual(), loader("tiny_gpt"))


def test_what_is_needed_elsewhere_is_not_zeroed() -> None:
    shared = nn.Linear(2, 2)
    a, b = nn.Sequential(shared, nn.Linear(2, 2)), nn.Sequential(shared, nn.Linear(2, 2))
    root = nn.ModuleList([a, b])
    assert used_outside(root, [a]) == {id(p) for p in b.parameters()}
    b[1].weight = a[1].weight  # type: ignore[union-attr]
    assert id(a[1].weight) in used_outside(root, [a]) and id(a[1].bias) not in used_outside(root, [a])


# -- summaries of the model


@pytest.mark.parametrize("first", [True, False], ids=["summary first", "technique first"])
def test_summaries_count_what_is_to_be_trained(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    trainable: list[int] = []
    during: list[int] = []

    class Counts(ModelSummary):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainable.append(self._summary(trainer, pl_module).trainable_parameters)  # type: ignore[union-attr]
            super().on_fit_start(trainer, pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            during.append(sum(p.numel() for p in pl_module.parameters() if p.requires_grad))

    net = TinyGPT()
    net.embed.requires_grad_(False)
    expected = summarize(net).trainable_parameters
    block = sum(p.numel() for p in Block(16, 0.0).parameters())
    callbacks = [stacking(), Counts()]
    with caplog.at_level("INFO"):
        trainer(*(callbacks[::-1] if first else callbacks), max_steps=8).fit(net, loader("tiny_gpt"))
    assert trainable == [expected]
    assert [expected - count for count in during] == [3 * block] * 2 + [2 * block] * 2 + [0] * 4
    assert caplog.text.count("ProgressiveStacking") == 1, "one line says which blocks were found"
    assert not net.embed.weight.requires_grad and net.position.weight.requires_grad


def test_what_is_frozen_when_the_fit_starts_stays_frozen() -> None:
    class Freezes(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.blocks[3].norm1.requires_grad_(False)

    net: Any = TinyGPT()
    trainer(stacking(), Freezes(), max_steps=8).fit(net, loader("tiny_gpt"))
    assert not net.blocks[3].norm1.weight.requires_grad and net.blocks[3].norm2.weight.requires_grad


# -- compiled modules


@pytest.mark.filterwarnings("ignore")  # torch's compiler, about its own insides
@pytest.mark.parametrize("way", ["wrapped", "in place", "forward"])
def test_blocks_within_a_compiled_module_are_refused(way: str) -> None:
    net: HuggingFace = hugging_face("gpt2")
    if way == "wrapped":
        net.model = torch.compile(net.model, backend="eager")  # type: ignore[assignment]
    elif way == "in place":
        net.model.compile(backend="eager")
    else:
        net.model.forward = torch.compile(net.model.forward, backend="eager")
    with pytest.raises(
        ValueError, match=r"ProgressiveStacking: .* 'model', which is compiled.*Compile the blocks one by"
    ):
        trainer(stacking(), max_steps=4).fit(net, loader("gpt2"))
    with pytest.raises(ValueError, match=r"Shallower: .* 'model', which is compiled as a whole"):
        trainer(Shallower(kept=lambda n: 2), max_steps=4).fit(net, loader("gpt2"))


@pytest.mark.filterwarnings("ignore")  # torch's compiler, about its own insides
@pytest.mark.parametrize("build", [stacking, lambda: ProgressiveLayerDropping(theta_min=0.3, gamma=20.0)])
def test_blocks_that_are_compiled_one_by_one_train_as_plain_ones(build: Any) -> None:
    """Also where a pass before the fit has compiled them already."""
    found, graphs = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for compiled in (False, True):
        torch.compiler.reset()
        pl.seed_everything(1, verbose=False)
        net = TinyGPT(dropout=0.0)
        if compiled:
            for block in net.blocks or ():
                block.compile(backend=backend)
            net(make_batch("tiny_gpt")["input_ids"])
        calls = [block._compiled_call_impl for block in net.blocks or ()]
        pl.seed_everything(2, verbose=False)
        trainer(build(), max_steps=12).fit(net, loader("tiny_gpt"))
        assert [block._compiled_call_impl for block in net.blocks or ()] == calls
        found.append(flat(net))
    torch.compiler.reset()
    assert torch.equal(*found)
    assert 0 < len(graphs) <= 8, "one for a block, and one more for blocks that begin to take gradients"


@pytest.mark.filterwarnings(f"ignore:{EARLY}")
def test_export_says_that_the_plain_module_is_another(tmp_path: Path) -> None:
    """It knows of a module as the fit left it; once other weights are put in, or the fit goes on to its end, all is well."""
    net, technique = module("tiny_gpt"), stacking()
    trainer(technique, Stops(), max_steps=12).fit(net, loader("tiny_gpt"))
    for part in (net, net.blocks):
        with pytest.raises(ValueError, match=r"lightning_eff.export: .*first 2 of the 4 blocks .*finish='identity'"):
            export(part)  # pyright: ignore[reportArgumentType]
    export(net.head)
    whole = module("tiny_gpt")
    net.load_state_dict(whole.state_dict())
    assert torch.equal(flat(export(net)), flat(whole))
    for finish, stops in (("identity", [Stops()]), (None, [])):
        net, _ = fit("tiny_gpt", lambda finish=finish: [stacking(finish=finish)], callbacks=stops)
        assert torch.equal(flat(export(net)), flat(net))
