"""Compiled blocks: the same training, one compilation for all that are alike, and nothing left of it afterwards."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options

from lightning_eff import (
    ProgressiveLayerDropping,
    ProgressiveStacking,
    RegionalCompilation,
    Rematerialization,
    SequenceLengthWarmup,
)
from lightning_eff._core.technique import Technique
from lightning_eff.model.execution import _compiled
from lightning_eff.model.execution.regional_compilation import Mode
from tests.cases import ALL, Case, no_blocks
from tests.models import TinyGPT, flat, hugging_face, loader, trainer
from tests.runs import checkpoints, differences, final_state, fit, fit_yaml

CASES = {
    "RegionalCompilation": Case(
        active=lambda: RegionalCompilation(backend="eager"),
        neutral=lambda: RegionalCompilation(backend=None),
        exact=True,
        rounds=True,  # beside dropped blocks on fewer tokens, as the float64 test below shows
        figure="blocks",
        lost=(no_blocks, "classifier", "RegionalCompilation: found no stack of repeated blocks"),
    )
}


def compiled(**kwargs: Any) -> RegionalCompilation:
    return RegionalCompilation(**{"backend": "eager", **kwargs})


@pytest.fixture
def afresh() -> Iterator[None]:
    """Nothing has been compiled yet in this process, and nothing stays so."""
    _compiled._KINDS.clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    _compiled._KINDS.clear()
    torch._dynamo.reset()
    counters.clear()


# -- once, whatever the depth


def hugging_face_as_it_is(name: str, num_layers: int) -> pl.LightningModule:
    """With a cache of keys and values, as configurations have it by default."""
    net = hugging_face(name, num_layers)
    net.model.config.use_cache = True  # pyright: ignore[reportAttributeAccessIssue]
    return net


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "llama", "bert", "vit", "t5"])
def test_compilations_do_not_grow_with_depth(name: str, afresh: None) -> None:
    found = []
    for depth in (2, 5):
        torch._dynamo.reset()
        counters.clear()
        _compiled._KINDS.clear()
        technique = compiled()
        net = TinyGPT(num_layers=depth) if name == "tiny_gpt" else hugging_face_as_it_is(name, depth)
        trainer(technique, max_steps=2).fit(net, loader(name))
        told = technique.report()
        assert told["blocks"] == (2 * depth if name == "t5" else depth)
        assert told["compilations"] == counters["stats"]["unique_graphs"]
        found.append(told["compilations"])
    shallow, deep = found
    # T5's first blocks have position tables, and its decoder's blocks another class of attention
    assert shallow == deep == {"t5": 4}.get(name, 1)


class Mixed(pl.LightningModule):
    """Blocks of which every other one reads another switch, and of which each has a number that it does not read."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Switched(i) for i in range(depth))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


class Switched(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.odd, self.calls = index, bool(index % 2), 0
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh() if self.odd else self.up(x).relu())


def test_blocks_of_two_ways_are_compiled_twice(afresh: None) -> None:
    found = []
    for depth in (4, 12):
        torch._dynamo.reset()
        technique = compiled()
        trainer(technique, max_steps=2).fit(Mixed(depth), loader("classifier"))
        found.append(technique.report()["compilations"])
    assert found == [2, 2]


def test_a_second_fit_in_the_process_compiles_nothing(afresh: None) -> None:
    first, second = compiled(), compiled()
    fit("tiny_gpt", lambda: [first], max_steps=2)
    fit("tiny_gpt", lambda: [second], max_steps=2)
    assert first.report()["compilations"] == 1 and second.report()["compilations"] == 0
    assert second.report()["blocks"] == 4


def test_validation_is_plain(afresh: None) -> None:
    technique = compiled()
    fit("tiny_gpt", lambda: [technique], limit_val_batches=2, num_sanity_val_steps=1, val_check_interval=2)
    assert technique.report()["compilations"] == counters["stats"]["unique_graphs"] == 1


# -- shapes


@pytest.mark.parametrize(("dynamic", "count"), [(True, 1), (False, 3), (None, 2)])
def test_shapes(dynamic: bool | None, count: int, afresh: None) -> None:
    """Batches of 4, 4 and 3 samples, and of 8 and 6 sequences once they are half as long."""
    technique = compiled(dynamic=dynamic)
    net = TinyGPT(dropout=0.0)
    lengths = iter((32, 32, 16, 8))
    step = net.training_step

    def shorter(batch: Any, batch_idx: int) -> Tensor:
        length = next(lengths)
        return step({key: value[:, :length] for key, value in batch.items()}, batch_idx)

    net.training_step = shorter
    trainer(technique, max_steps=4).fit(net, loader("tiny_gpt"))
    assert technique.report()["compilations"] == count


def test_length_warm_up_is_marked_dynamic(afresh: None, capsys: pytest.CaptureFixture[str]) -> None:
    def warm_up() -> SequenceLengthWarmup:
        return SequenceLengthWarmup(start=8, until=0.9)

    technique = compiled()
    whole = final_state(*fit("tiny_gpt", lambda: [warm_up()]))
    assert differences(whole, final_state(*fit("tiny_gpt", lambda: [warm_up(), technique]))) == []
    assert technique.report()["compilations"] == counters["stats"]["unique_graphs"] == 1


# -- beside those that act on blocks


@pytest.mark.parametrize(
    "other",
    [
        lambda: ProgressiveStacking(stages=[(0.0, 2), (0.4, 4)]),
        lambda: ProgressiveLayerDropping(theta_min=0.5),
        lambda: Rematerialization(policy="full"),
        lambda: Rematerialization(policy="sqrt"),
    ],
    ids=["growth", "dropping", "full", "sqrt"],
)
@pytest.mark.parametrize("first", [True, False])
def test_beside_those_that_act_on_blocks_it_compiles_once(other: Any, first: bool, afresh: None) -> None:
    technique, acting = compiled(), other()
    both = [technique, acting] if first else [acting, technique]
    whole = final_state(*fit("tiny_gpt", lambda: [other()]))
    assert differences(whole, final_state(*fit("tiny_gpt", lambda: both))) == []
    assert technique.report()["compilations"] == 1 and technique.report()["blocks"] == 4
    if isinstance(acting, Rematerialization):
        assert acting.report()["recomputed_calls"] > 0, "and is not left out"


@pytest.mark.parametrize("name", ["ImportanceSampling", "MESA", "NgramEmbedding"])
def test_those_that_listen_to_the_step_are_not_compiled_with_the_blocks(name: str, afresh: None) -> None:
    """One version with gradients and one without, in one piece."""
    technique = compiled()
    fit("tiny_gpt", lambda: [technique, ALL[name].active()], max_steps=4)
    assert technique.report()["compilations"] == {"NgramEmbedding": 1}.get(name, 2)
    assert not counters["graph_break"]


# -- the module stays plain


class Look(pl.Callback):
    """Looks at copies of the module in mid-run."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert sorted(pl_module.state_dict()) == sorted(TinyGPT().state_dict())
        assert isinstance(pl_module, TinyGPT) and pl_module.blocks is not None
        assert all(block._compiled_call_impl is not None for block in pl_module.blocks)
        for copied in (copy.deepcopy(pl_module.blocks), pickle.loads(pickle.dumps(pl_module.blocks))):
            assert all(block._compiled_call_impl is None and "forward" not in vars(block) for block in copied)
            x = torch.randn(2, 8, 16)
            torch.testing.assert_close(copied[0].eval()(x), copy.deepcopy(pl_module.blocks[0]).eval()(x))


def test_copies_made_in_the_run_are_plain() -> None:
    net, _ = fit("tiny_gpt", lambda: [compiled()], callbacks=[Look()], max_steps=2)
    assert isinstance(net, TinyGPT) and net.blocks is not None
    assert all("_compiled_call_impl" not in vars(block) for block in net.blocks)


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    """Bit for bit, as this backend computes what plain training does."""
    whole = final_state(*fit("tiny_gpt", lambda: [compiled()], directory=tmp_path / "a"))
    plain = final_state(*fit("tiny_gpt", lambda: [compiled(backend=None)], directory=tmp_path / "b"))
    assert differences(whole, plain) == []
    for build, folder in ((compiled, "b"), (lambda: compiled(backend=None), "a")):
        resumed = fit("tiny_gpt", lambda build=build: [build()], resume=checkpoints(tmp_path / folder)[4])
        assert differences(whole, final_state(*resumed)) == []


def test_hooks_on_a_block_stay_outside(afresh: None) -> None:
    """They see what they see in plain training, and gradients."""

    def seen(*techniques: Any) -> list[float]:
        pl.seed_everything(1, verbose=False)
        net, found = TinyGPT(dropout=0.0), []
        assert net.blocks is not None
        net.blocks[1].register_forward_hook(lambda m, args, output: found.append(float(output.detach().sum())))
        net.blocks[2].register_full_backward_hook(lambda m, into, out: found.append(float(out[0].abs().sum())))
        net.blocks[2].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        trainer(*techniques, max_steps=3).fit(net, loader("tiny_gpt", shuffle=False))
        return found

    technique = compiled()
    plain, hooked = seen(), seen(technique)
    assert plain == hooked and len(plain) == 6
    assert technique.report()["compilations"] == 1


# -- inductor


def distance(a: nn.Module, b: nn.Module) -> float:
    return float((flat(a).double() - flat(b).double()).norm())


@pytest.fixture
def inductor(afresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What it compiles lies in a folder of the test's own; nothing is compiled by other processes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with inductor_config.patch(compile_threads=1):
        yield


def test_numbers_are_those_of_plain_training_to_rounding(inductor: None) -> None:
    """As near to a run in float64 as plain training is, with the same dropout."""

    def run(*techniques: Any, double: bool = False) -> pl.LightningModule:
        pl.seed_everything(1, verbose=False)
        net = TinyGPT(num_layers=3, dropout=0.2)
        net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)  # type: ignore[method-assign]
        t = trainer(*techniques, max_steps=6, precision="64-true" if double else "32-true")
        t.fit(net, loader("tiny_gpt"))
        return net

    exact, plain = run(double=True), run()
    technique = compiled(backend="inductor")
    got = run(technique)
    assert 0 < distance(got, exact) < 3 * distance(plain, exact) < 1e-3 * distance(plain, TinyGPT(num_layers=3))
    told = technique.report()
    assert told["compilations"] == 1 and told["blocks"] == 3 and told["setup_seconds"] > 0.5
    _compiled._KINDS.clear()
    assert torch.equal(flat(run(compiled(backend="inductor"))), flat(got)), "compiled anew, another run"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "others", [list, lambda: [SequenceLengthWarmup(start=8, until=0.7)]], ids=["static", "dynamic"]
)
def test_resumes_to_the_bit_where_nothing_is_compiled_yet(
    others: Any, inductor: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another process on another machine: with no version of this one's, and no file of its compiler."""

    def run(**kwargs: Any) -> dict[str, Tensor]:
        _compiled._KINDS.clear()
        torch._dynamo.reset()
        return final_state(*fit("tiny_gpt", lambda: [compiled(backend="inductor"), *others()], max_steps=6, **kwargs))

    whole = run(directory=tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    assert differences(whole, run(resume=checkpoints(tmp_path)[3])) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_numbers_of_inductors_own_are_another_run(inductor: None) -> None:
    plain = flat(fit("tiny_gpt", list, max_steps=3)[0])
    same = flat(fit("tiny_gpt", lambda: [compiled(backend="inductor")], max_steps=3)[0])
    own = [
        flat(fit("tiny_gpt", lambda: [compiled(backend="inductor", same_random=False)], max_steps=3)[0])
        for _ in range(2)
    ]
    assert (same - plain).abs().max() < 1e-4 < 1e-3 < (own[0] - plain).abs().max()
    assert torch.equal(*own), "and the same each time"


# -- what is told


class Counting(Mixed):
    """Its blocks read how often they have been called."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.calls += 1  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]
        return super().training_step(batch, batch_idx)


class Reading(Switched):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.01 * self.calls)


def test_the_limit_of_versions_is_told_with_what_changed(afresh: None) -> None:
    def run(*techniques: Any) -> Tensor:
        pl.seed_everything(1, verbose=False)
        net = Counting(2)
        net.blocks = nn.ModuleList(Reading(0) for _ in range(2))
        trainer(*techniques, max_steps=11).fit(net, loader("classifier", 60))
        return flat(net)

    limit = torch._dynamo.config.recompile_limit
    technique = compiled()
    with pytest.warns(UserWarning, match=rf"code of Reading .*= {limit}\), .*from step 9 on.*: block.calls == 8\."):
        got = run(technique)
    assert technique.report()["compilations"] == limit == 8
    assert torch.equal(got, run())
    again = compiled()
    with pytest.warns(UserWarning, match="has reached its limit of versions"):
        run(again)
    assert again.report()["compilations"] == limit, "the next run begins anew"


def test_what_earlier_runs_compiled_counts_against_no_later_one(afresh: None) -> None:
    """Several runs in one process, as in a notebook, each with fewer versions of its own than torch allows."""
    for run in range(3):
        net = Counting(2)
        net.blocks = nn.ModuleList(Reading(0) for _ in range(2))
        for block in net.blocks:
            block.calls = 100 * run  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        technique = compiled()
        trainer(technique, max_steps=6).fit(net, loader("classifier", 60))
        assert technique.report()["compilations"] == 6
    assert torch._dynamo.config.recompile_limit == 8


def test_what_was_compiled_anew_is_told_with_what_changed(afresh: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer(compiled(), max_steps=1).fit(Mixed(4), loader("classifier"))
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("RegionalCompilation")]
    assert told[0] == "RegionalCompilation: will compile 'blocks' (4 x Switched) in the first step."
    assert told[1].startswith("RegionalCompilation: compiled 2 x Switched in ")
    assert told[1].endswith(" s (step 1, 4 blocks run compiled)")
    assert told[2].startswith(
        "RegionalCompilation: 'blocks.1' needed its own version (step 1), because this does not hold"
    )
    assert told[2].endswith("for it: block.odd == False") and len(told) == 3


class Printing(Switched):
    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(x))
        torch._dynamo.graph_break()
        return self.down(self.up(x))


def test_pieces_are_told(afresh: None, caplog: pytest.LogCaptureFixture) -> None:
    net, technique = Mixed(3), compiled()
    net.blocks = nn.ModuleList(Printing(0) for _ in range(3))
    with caplog.at_level("INFO"):
        trainer(technique, max_steps=2).fit(net, loader("classifier"))
    assert "'blocks.0' is compiled in " in caplog.text and "pieces, which gains less: Call to" in caplog.text
    assert technique.report()["blocks"] == 3
    assert technique.report()["compilations"] <= 3, "and no more for the other blocks"


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "RegionalCompilation", {"backend": "eager", "dynamic": False}, max_steps=3)
    assert "ran 3 blocks compiled, after " in capsys.readouterr().out


# -- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fast"}, r"mode='fast'\): expected 'default', 'reduce-overhead', .*, or None"),
        ({"dynamic": "yes"}, r"dynamic='yes'\): expected True or False, or None"),
        ({"backend": 3}, r"backend=3\): expected the name of a backend of torch.compile, or None"),
        (
            {"backend": "eager", "mode": "default"},
            r"mode='default', backend='eager'\): only inductor has modes. Use mode=None",
        ),
        ({"same_random": 1}, r"same_random=1\): expected True or False"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RegionalCompilation(**arguments)


def test_modes_are_torchs() -> None:
    assert set(get_args(Mode)) == set(list_mode_options()) - {"lite"}


def refused(
    net: pl.LightningModule, message: str, *, name: str = "tiny_gpt", error: Any = ValueError, **kwargs: Any
) -> None:
    before = flat(net).clone()
    with pytest.raises(error, match=message):
        trainer(compiled(**kwargs), max_steps=1).fit(net, loader(name))
    assert torch.equal(flat(net), before)


@pytest.mark.parametrize("name", ["RandomLTD", "TokenDropping"])
def test_dropped_blocks_on_fewer_tokens_differ_by_rounding_alone(name: str) -> None:
    """Three gradients meet in one tensor there, and come in another order; in float64 that is all but nothing."""

    def run(*more: str) -> Tensor:
        names = ("ProgressiveLayerDropping", name, *more)
        return flat(fit("tiny_gpt", lambda: [ALL[n].active() for n in names], precision="64-true")[0])

    plain, ours = run(), run("RegionalCompilation")
    assert float((ours - plain).norm() / plain.norm()) < 1e-11


def test_unknown_backends_are_refused() -> None:
    refused(
        TinyGPT(),
        r"backend='fast'\): torch.compile has no such backend here. Use one of .*inductor",
        backend="fast",
    )


def test_a_missing_compiler_is_told_at_setup() -> None:
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        refused(TinyGPT(), "found no C\\+\\+ compiler.*Put g\\+\\+ or clang", backend="inductor")


def with_blocks() -> tuple[TinyGPT, nn.ModuleList]:
    net = TinyGPT()
    assert net.blocks is not None
    return net, net.blocks


def test_what_is_compiled_already_is_refused() -> None:
    net, blocks = with_blocks()
    blocks[1].compile(backend="eager")
    refused(net, "'blocks.1' is already compiled. Remove torch.compile from the module")
    net, _ = with_blocks()
    net.compile(backend="eager")
    refused(net, "are inside 'the LightningModule', which is compiled as a whole")
    net, blocks = with_blocks()
    wrapped: Any = torch.compile(blocks[0], backend="eager")
    blocks[0] = wrapped
    refused(net, "'blocks.0' is already compiled")
    net, blocks = with_blocks()
    blocks[2].get_submodule("mlp").compile(backend="eager")
    refused(net, "'blocks.2.mlp' is already compiled")


def test_full_backward_hooks_within_blocks_are_refused() -> None:
    net, blocks = with_blocks()
    blocks[3].get_submodule("mlp").register_full_backward_hook(lambda m, into, out: None)
    refused(net, "'blocks.3.mlp' has full backward hooks")


def test_a_first_step_that_drops_every_block_is_none_to_judge_by() -> None:
    class DropsAll(Technique):
        """Passes over every block in the first step."""

        saves = paper = "nothing"
        drops_blocks = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

        def on_model(self, session: Any) -> None:
            self.stack = session.stack(None, who="DropsAll")

        def on_batch_start(self, session: Any, batch: Any, batch_idx: int) -> None:
            self.stack.dropped = frozenset(() if session.trainer.global_step else range(4))

    technique = compiled()
    fit("tiny_gpt", lambda: [technique, DropsAll()], max_steps=2)
    assert technique.report()["blocks"] == 4


def test_a_stack_may_be_named() -> None:
    refused(TinyGPT(), r"RegionalCompilation\(layers='block'\): .*Candidates: 'blocks' \(4 x Block\)", layers="block")
    technique = compiled(layers="blocks")
    fit("tiny_gpt", lambda: [technique], max_steps=1)
    assert technique.report()["blocks"] == 4


class ByForward(Mixed):
    """Calls its blocks' forward, as transformers' SqueezeBERT does."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = block.forward(x)
        return x.square().mean()


def test_blocks_that_are_not_called_as_a_whole_are_told_before_any_weight_changes() -> None:
    refused(
        ByForward(3), "training_step called none of the blocks 'blocks.0' .. 'blocks.2' as a whole", name="classifier"
    )


def test_a_failing_compiler_is_told_before_any_weight_changes(afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("planted")

    torch._dynamo.register_backend(fails, name="planted_to_fail")
    refused(
        TinyGPT(), "torch's compiler failed on 'blocks.0': .*planted", error=RuntimeError, backend="planted_to_fail"
    )
