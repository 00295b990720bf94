"""The contract of DESIGN: ten points that hold for everything exported, one case each in ``tests.cases``.

What can be said of any callback holds for the stand-ins too, which are not exported and take others' places in control
arms.
"""

import copy
import inspect
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import nn

import lightning_eff
from lightning_eff._core.technique import Control, Technique, techniques_of
from tests.cases import ALL, CASES, EXAMPLES, MISSING, NEEDS, STAND_INS, Case, case_of
from tests.conftest import Once
from tests.covering import Stack, gathered
from tests.ddp import launch
from tests.models import flat, loader, make_batch, module, trainer
from tests.runs import (
    MODES,
    NUM_STEPS,
    LateFiles,
    checkpoints,
    differences,
    final_state,
    fit,
    plain,
    resume_from_batches,
    resume_from_every_step,
)
from tests.selection import chosen, often, one_of, share_of
from tests.stacks import cut_down, declared, model_of

NAMES = sorted(CASES)
# a scope beyond one test lets pytest try one technique after the other, so that tests of one can share its run
every = pytest.mark.parametrize("name", NAMES, scope="module")
every_and_examples = pytest.mark.parametrize("name", [*NAMES, *sorted(STAND_INS), *sorted(EXAMPLES)], scope="module")
every_and_stand_ins = pytest.mark.parametrize("name", [*NAMES, *sorted(STAND_INS)], scope="module")


def half_often(names: Sequence[str], key: str) -> Any:
    """Half of the names are tried by `make test`, by ``key``, and all by `make test-full`."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=often(2, name, key)) for name in names], scope="module"
    )


def a_third(names: Sequence[str], key: str) -> Any:
    """A third of the names is tried each time, by ``key``, and all if slow ones run."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=one_of(3, name, key)) for name in names], scope="module"
    )


class _Memory(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, list[float]] = {}

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for key, value in metrics.items():
            self.metrics.setdefault(key, []).append(value)


@dataclass
class Undisturbed:
    """A run of one technique alone, logged at every step.

    Attributes:
        technique: has fitted once, or more often where a test lets it fit again.
        directory: of the checkpoints, of every step if a test of this session looks at each of them.
        final: what the run left behind.
        reported: by its technique as it ended.
        summary: of it.
        logged: by its logger.
    """

    technique: Technique
    directory: Path
    final: dict[str, torch.Tensor]
    reported: dict[str, float]
    summary: str
    logged: dict[str, list[float]]


@pytest.fixture(scope="module")
def looks_at_each_step(request: pytest.FixtureRequest) -> bool:
    """Whether this session looks at a checkpoint of every step, and not only at those that are resumed from."""
    looking = test_checkpoints_are_the_plain_modules.__name__
    return any(getattr(item, "originalname", None) == looking for item in request.session.items)


@pytest.fixture(scope="module")
def undisturbed(
    name: str, tmp_path_factory: pytest.TempPathFactory, looks_at_each_step: bool
) -> Callable[[], Undisturbed]:
    """The run that several tests of a technique look at, made within the first of them."""

    @cache
    def run() -> Undisturbed:
        case, logger, directory = case_of(name), _Memory(), tmp_path_factory.mktemp("undisturbed")
        technique = case.active()
        settings: dict[str, Any] = {"directory": directory, "logger": logger, "log_every_n_steps": 1}
        steps = None if looks_at_each_step else (third_of(name) + 1, NUM_STEPS)
        net, t = fit(case.model, lambda: [technique], steps=steps, plugins=[LateFiles()], **settings)
        report = dict(technique.report())
        return Undisturbed(technique, directory, final_state(net, t), report, technique.summary(), logger.metrics)

    return run


def test_every_export_has_a_case() -> None:
    """What is no technique is held to what applies of the contract by tests of its own kind."""
    exported = {name: getattr(lightning_eff, name) for name in lightning_eff.__all__}
    techniques = {name for name, cls in exported.items() if isinstance(cls, type) and issubclass(cls, Technique)}
    assert techniques - MISSING == set(CASES) and set(NEEDS) >= MISSING
    for name in NAMES:
        technique = CASES[name].active()
        assert type(technique).__name__ == name
        assert isinstance(technique, Technique)
        assert not technique.neutral
        assert CASES[name].exact == bool(CASES[name].figure), "weights do not show what it did, and so a figure must"


def test_every_stand_in_has_a_case() -> None:
    """What takes a technique's place in a control arm is exported, or has a case of its own."""
    recipes = [case.active() for case in CASES.values()]
    arms = [arm for technique in recipes for arm in technique.control.arms(technique).values()]
    assert {type(arm).__name__ for arm in arms} - set(CASES) == set(STAND_INS)
    assert all(isinstance(arm, Technique) for arm in arms)
    for name, case in STAND_INS.items():
        assert type(case.active()).__name__ == name


# -- 1. no change to the module; hand-written and Hugging Face alike


def _families(name: str) -> list[Any]:
    """A decoder and another network by the technique's name, of which `make test` tries one; all four when asked for."""
    tried = [("gpt2", "llama")[share_of(2, name)], ("bert", "vit")[share_of(2, name, "another")]]
    marks = dict.fromkeys(("gpt2", "llama", "bert", "vit"), pytest.mark.slow)
    marks |= {tried[share_of(2, name, "family")]: (), tried[1 - share_of(2, name, "family")]: pytest.mark.full}
    return [pytest.param(name, model, marks=some) for model, some in marks.items()]


@pytest.mark.parametrize(("name", "model"), [one for name in NAMES for one in _families(name)], scope="module")
def test_trains_hugging_face_models(name: str, model: str) -> None:
    if model in CASES[name].refuses:
        with pytest.raises(ValueError, match=CASES[name].refuses[model]):
            fit(model, lambda: [CASES[name].active()], max_steps=2)
        return
    technique = CASES[name].active()
    net, t = fit(model, lambda: [technique])
    without = flat(plain(model)[0])
    assert t.global_step == NUM_STEPS
    assert flat(net).isfinite().all()
    if model in CASES[name].idle:
        assert torch.equal(flat(net), without), "there is nothing to do, and weights are others"
    elif CASES[name].exact:
        assert torch.equal(flat(net), without)
        assert technique.report()[CASES[name].figure] > 0, "the technique did nothing"
    else:
        assert not torch.equal(flat(net), without), "the technique changed nothing"


# -- 2. finds what it acts on, or raises; neutral settings are plain training


@every_and_stand_ins
def test_raises_where_it_finds_nothing(name: str) -> None:
    lost = ALL[name].lost
    assert (lost is None) == ALL[name].anywhere
    if lost is None:
        return
    build, data, message = lost
    net = build()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises((ValueError, RuntimeError), match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that so short a run is plain training
        trainer((ALL[name].as_is or ALL[name].active)(), max_steps=3).fit(net, loader(data))
    after = net.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items()), "weights changed before the error"


NEUTRAL_ON = ("tiny_gpt", "classifier")


def _neutral(name: str, model: str) -> Technique:
    case = CASES[name]
    return ((case.neutral_on_classifier if model == "classifier" else None) or case.neutral)()


@pytest.mark.parametrize("model", NEUTRAL_ON)
def test_neutral_settings_together_are_plain_training(model: str, request: pytest.FixtureRequest) -> None:
    """All techniques in one run, or the chosen one; some are alone below, and each is behind the ``slow`` marker."""
    name = chosen(request.config)

    def wrong(names: Stack) -> str | None:
        whole = final_state(*fit(model, lambda: [_neutral(name, model) for name in names]))
        found = differences(whole, plain(model)[1])
        return f"ends otherwise than plain training: {found}" if found else None

    # what has no neutral settings acts here, and cannot be with all others
    every = tuple(one for one in NAMES if not CASES[one].neutral_by_machine)
    cut_down(every if name is None else (name,) * (name in CASES), wrong)


@pytest.mark.parametrize(
    ("name", "model"),
    [pytest.param(name, model, marks=one_of(4, name, model, "neutral")) for name in NAMES for model in NEUTRAL_ON],
    scope="module",
)
def test_neutral_settings_are_plain_training(name: str, model: str) -> None:
    whole = final_state(*fit(model, lambda: [_neutral(name, model)]))
    assert differences(whole, plain(model)[1]) == []


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_neutral_stand_ins_are_plain_training(name: str) -> None:
    case = STAND_INS[name]
    whole = final_state(*fit(case.model, lambda: [case.neutral()]))
    assert differences(whole, plain(case.model)[1]) == []
    assert differences(whole, final_state(*fit(case.model, lambda: [case.active()]))) != []


# -- 3. resume equals uninterrupted


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for argument, some in (("group", groups), ("ddp_group", ddp_groups)):
        if argument in metafunc.fixturenames:
            found = some(metafunc.config)
            if metafunc.definition.name == "test_groups_resume" and chosen(metafunc.config) is None:
                found = [pytest.param(group, marks=one_of(3, *group, "resume")) for group in found]
            metafunc.parametrize(argument, found, ids=lambda group: f"{group[0]}-and-{len(group) - 1}")


def groups(config: pytest.Config) -> list[Stack]:
    """Few groups of techniques that train together, so that each stands in one: what shares a run costs one run."""
    name = chosen(config)
    if name is not None:
        return [(name,)] if name in ALL else []
    refused = set(declared(ALL, {}))
    found: list[Stack] = []
    for cases in (CASES, STAND_INS):
        for model in sorted({case.model for case in cases.values()}):
            found += gathered([name for name, case in cases.items() if case.model == model], refused)
    return found


def ddp_groups(config: pytest.Config) -> list[Stack]:
    """A third of the groups: all of their techniques, one by one, are tried under DDP if slow ones run."""
    return [group for group in groups(config) if chosen(config) is not None or share_of(3, *group) == 0]


def third_of(name: str) -> int:
    """From which third of the steps it is resumed alone, or a group is: from all if slow ones run."""
    return share_of(3, name)


@every_and_examples
def test_resume_equals_uninterrupted(name: str, undisturbed: Callable[[], Undisturbed]) -> None:
    """From checkpoints that were written in the background, and from those of a resumed run, which were written at once."""
    case, run = case_of(name), undisturbed()
    some = third_of(name)
    assert resume_from_every_step(case.model, lambda: [case.active()], run.directory, whole=run.final, third=some) == {}


@every_and_examples
def test_can_be_pickled_and_copied_before_and_after_a_fit(name: str, undisturbed: Callable[[], Undisturbed]) -> None:
    """As ``ddp_spawn`` does before, and whoever trains twice does after; a copy knows what the run did, and not the run."""
    ways = (lambda technique: pickle.loads(pickle.dumps(technique)), copy.deepcopy)
    for technique, trained in ((case_of(name).active(), False), (undisturbed().technique, True)):
        for made in ways:
            again = made(technique)
            assert repr(again) == repr(technique)
            if trained:
                assert again.summary() == technique.summary()
                told, known = ({k: str(float(v)) for k, v in t.report().items()} for t in (again, technique))
                assert told == known
            assert not [key for key, value in vars(again).items() if isinstance(value, pl.Trainer | pl.LightningModule)]


BY_THE_CLOCK = ("LoaderTuning",)  # all that it reports follows from measured seconds


@half_often([*NAMES, *sorted(STAND_INS)], "other package")
def test_runs_alike_and_resumes_under_pytorch_lightning(
    name: str, tmp_path: Path, undisturbed: Callable[[], Undisturbed]
) -> None:
    """The same run under Lightning's other name; a third of them is saved in mid-epoch and resumed from there."""
    from tests.pl import runs

    case, run = ALL[name], undisturbed()
    technique, saved = case.active(), 2 + share_of(2, name)
    net, t = runs.fit(case.model, lambda: [technique], callbacks=[runs.SaveBatches(tmp_path, [saved])])
    assert type(net).__module__.startswith("tests.pl") and isinstance(t, runs.pl.Trainer)
    assert differences(run.final, final_state(net, t)) == []
    if name not in BY_THE_CLOCK:
        reported = dict(technique.report())
        # what the clock decides, and what a compiler kept of earlier runs
        measured = {key: value for key, value in run.reported.items() if "seconds" in key or key == "compilations"}
        assert reported.keys() == run.reported.keys() and {**reported, **measured} == run.reported
    if share_of(3, name, "other name") == 0:
        resumed = runs.fit(case.model, lambda: [case.active()], resume=tmp_path / f"batch={saved}.ckpt")
        assert differences(run.final, final_state(*resumed)) == []


OTHER_MODES = sorted(set(MODES) - {"plain"})


def _resumed(group: Stack, mode: str, root: Path, third: int | None) -> None:
    directories = (root / str(i) for i in count())

    def wrong(names: Stack) -> str | None:
        build, settings = (lambda: [ALL[name].active() for name in names]), MODES[mode]
        found = resume_from_every_step(model_of(names, ALL), build, next(directories), third=third, **settings)
        return f"ends otherwise where it resumes: {found}" if found else None

    cut_down(group, wrong)


def test_groups_resume(group: Stack, tmp_path: Path) -> None:
    """From a third of the steps, which may be another one than those of its techniques alone."""
    _resumed(group, "accumulate_clip", tmp_path, third_of("+".join(group)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", OTHER_MODES)
def test_groups_resume_from_every_step(group: Stack, mode: str, tmp_path: Path) -> None:
    _resumed(group, mode, tmp_path, None)


@pytest.mark.slow
@every_and_stand_ins
@pytest.mark.parametrize("mode", sorted(MODES))
def test_resume_from_every_step_in_every_mode(name: str, mode: str, tmp_path: Path) -> None:
    """Each of the undisturbed run's checkpoints, to the end."""
    case = ALL[name]
    assert resume_from_every_step(case.model, lambda: [case.active()], tmp_path, each=True, **MODES[mode]) == {}


@a_third(NAMES, "batch norm")
def test_resume_without_dropout_layers_but_with_batch_norm(name: str, tmp_path: Path) -> None:
    some = third_of(name[::-1])
    if (
        CASES[name].too_small or "classifier" in CASES[name].refuses
    ):  # it needs large tensors, sequences, or residual blocks
        families = ("gpt2", "vit", "bert", "translator", "llama")
        model = next((model for model in families if model not in CASES[name].refuses), CASES[name].model)
        assert resume_from_every_step(model, lambda: [CASES[name].active()], tmp_path, third=some) == {}
        return
    build = CASES[name].on_classifier or CASES[name].active
    assert resume_from_every_step("classifier", lambda: [build()], tmp_path, third=some) == {}


@a_third([*NAMES, *sorted(STAND_INS)], "windows")
def test_resume_within_accumulation_windows(name: str, tmp_path: Path) -> None:
    """The gradients summed so far are in a checkpoint that is saved between optimizer steps."""
    case = ALL[name]
    assert resume_from_batches(case.model, lambda: [case.active()], tmp_path, (2, 4, 9)) == {}


@pytest.fixture(scope="module")
def under_ddp(once: Once, request: pytest.FixtureRequest) -> dict[str, Any]:
    """One start of two processes for groups of techniques, in every mode and from some steps; of one, also alone."""
    name = chosen(request.config)
    what = [f"alone:{name}" for name in (sorted(EXAMPLES) if name is None else [name])]
    what += [f"together:{'+'.join(group)}" for group in ddp_groups(request.config)]
    what += [f"{strategy}:ExactResume" for strategy in HYBRID if name in (None, "ExactResume")]
    return once("ddp", lambda: launch("contract", *what, timeout=TIMEOUT))


@pytest.fixture(scope="module")
def each_under_ddp(once: Once, under_ddp: dict[str, Any]) -> dict[str, Any]:
    """As if each were chosen."""
    left = [what for what in (f"alone:{name}" for name in ALL) if what not in under_ddp]
    return once("ddp_alone", lambda: {**under_ddp, **launch("contract", *left, timeout=TIMEOUT)})


HYBRID = ("hybrid", "hybrid_tp2", "hybrid_pp2")
TIMEOUT = 1200  # seconds for all that shares the two processes; who is first waits for all of it
WELL_UNDER_DDP = {"alike": True, "finite": True, "steps": NUM_STEPS, "differences": [[], []]}


@pytest.mark.timeout(TIMEOUT)
def test_alone_under_ddp(request: pytest.FixtureRequest, under_ddp: dict[str, Any]) -> None:
    """It trains, ranks end alike, and a resumed run as the undisturbed one: examples, and what is chosen.

    The others do so in groups below, and each alone behind the ``slow`` marker.
    """
    name = chosen(request.config)
    found = {name: under_ddp[f"alone:{name}"] for name in (sorted(EXAMPLES) if name is None else [name])}
    assert found == dict.fromkeys(found, WELL_UNDER_DDP)


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("strategy", HYBRID)
def test_resume_under_hybrid_strategies(
    strategy: str, request: pytest.FixtureRequest, under_ddp: dict[str, Any]
) -> None:
    """One technique for all, whose work it is; ``tests/strategies/test_hybrid_resume.py`` resumes from every batch."""
    if chosen(request.config) in (None, "ExactResume"):
        assert under_ddp[f"{strategy}:ExactResume"] == WELL_UNDER_DDP


@pytest.mark.slow
@every_and_stand_ins
@pytest.mark.timeout(TIMEOUT)
def test_each_alone_under_ddp(name: str, each_under_ddp: dict[str, Any]) -> None:
    assert each_under_ddp[f"alone:{name}"] == WELL_UNDER_DDP


@pytest.mark.timeout(TIMEOUT)
def test_groups_under_ddp(ddp_group: Stack, under_ddp: dict[str, Any]) -> None:
    """In every mode; and they resume, also within accumulation windows, where each rank has its own sums.

    One by one, they do so from every step behind the ``slow`` marker, as all do in one process above.
    """
    assert under_ddp[f"together:{'+'.join(ddp_group)}"] is None


@pytest.fixture(scope="module")
def ddp_windows(once: Once) -> dict[str, Any]:
    return once("windows", lambda: launch("windows", *ALL, timeout=TIMEOUT))


@pytest.mark.slow
@every_and_stand_ins
@pytest.mark.timeout(TIMEOUT)
def test_resume_within_accumulation_windows_under_ddp(name: str, ddp_windows: dict[str, Any]) -> None:
    """Each rank goes on with its own gradients: they are exchanged at the window's end."""
    assert ddp_windows[name] == [{}, {}]


@pytest.fixture(scope="module")
def ddp_resumes(once: Once) -> dict[str, Any]:
    return once("resumes", lambda: launch("resume", *ALL, timeout=TIMEOUT))


@pytest.mark.slow
@every_and_stand_ins
@pytest.mark.timeout(TIMEOUT)
def test_resume_under_ddp(name: str, ddp_resumes: dict[str, Any]) -> None:
    found = ddp_resumes[name]
    assert found["checkpoints"] == found["expected"]
    assert found["alike"], "the ranks ended with different weights"
    assert found["differences"] == [{}, {}]


def test_killed_run_resumes(tmp_path: Path) -> None:
    """Kill -9 in mid-run, resume from the last checkpoint: the weights of an undisturbed run."""
    script = Path(__file__).with_name("killed_run.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path / "a")], env=env, cwd=script.parent.parent)
    try:
        deadline = time.monotonic() + 1200  # of a process that hangs, also on a busy machine
        while len(checkpoints(tmp_path / "a")) < 5 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    saved = checkpoints(tmp_path / "a")
    assert 5 <= len(saved) < NUM_STEPS
    assert process.returncode == -signal.SIGKILL
    from tests.killed_run import stack

    whole = final_state(*fit("tiny_gpt", stack))
    resumed = final_state(*fit("tiny_gpt", stack, resume=saved[-1]))
    assert differences(whole, resumed) == []


# -- 4. and 5. checkpoints load strictly into the plain module, with weights_only=True


@every_and_examples
def test_checkpoints_are_the_plain_modules(name: str, undisturbed: Callable[[], Undisturbed]) -> None:
    case = case_of(name)
    saved = checkpoints(undisturbed().directory)
    assert len(saved) == NUM_STEPS
    for path in saved:
        checkpoint = torch.load(path, weights_only=True)
        if case.architecture:
            _loads_into_what_apply_makes(case, checkpoint)
        else:
            module(case.model).load_state_dict(checkpoint["state_dict"], strict=True)
    if case.architecture or case.own_optimizer:  # the weights do not fit, or only the optimizer's state does not
        with pytest.raises((RuntimeError, ValueError), match=r"loading state_dict|parameter group"):
            fit(case.model, list, resume=saved[4])
        return
    net, t = fit(case.model, list, resume=saved[4])  # a plain trainer goes on from it
    assert t.global_step == NUM_STEPS
    assert flat(net).isfinite().all()


def _loads_into_what_apply_makes(case: Case, checkpoint: dict[str, Any]) -> None:
    """And ``export`` makes the plain module of it again, or says why it cannot."""
    changed = lightning_eff.apply(module(case.model), case.active())  # pyright: ignore[reportArgumentType]
    state = checkpoint["state_dict"]
    if case.partial:
        frozen = {name for name, p in changed.named_parameters(remove_duplicate=False) if not p.requires_grad}
        own = changed.state_dict()
        assert frozen and own.keys() - state.keys() == frozen, (
            "what trains is in a checkpoint, and nothing that is frozen"
        )
        state = {**{name: own[name] for name in frozen}, **state}
    changed.load_state_dict(state, strict=True)
    if case.stays:
        with pytest.raises(ValueError, match=case.stays):
            lightning_eff.export(changed)
        return
    plain = module(case.model)
    plain.load_state_dict(lightning_eff.export(changed).state_dict(), strict=True)
    batch = make_batch(case.model)
    changed.eval()
    plain.eval()
    for net in (changed, plain):
        net.__dict__["log"] = lambda *args, **kwargs: None
    steps = [net.training_step(batch, 0) for net in (changed, plain)]
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-5, atol=1e-5)


# -- 6. accumulation, clipping, bf16-mixed, DDP


@pytest.fixture(scope="module")
def ddp_modes(once: Once) -> dict[str, Any]:
    return once("modes", lambda: launch("modes", *ALL, timeout=TIMEOUT))


@pytest.mark.slow
@every_and_stand_ins
@pytest.mark.timeout(TIMEOUT)
def test_modes_under_ddp(name: str, ddp_modes: dict[str, Any]) -> None:
    assert set(ddp_modes[name]) == set(MODES)
    for mode, found in ddp_modes[name].items():
        assert found == {"alike": True, "finite": True, "steps": NUM_STEPS}, mode


@every_and_stand_ins
def test_unsupported_strategies_are_refused(name: str) -> None:
    """Those that divide a module in ways that leave a need unmet; ``tests/strategies/test_techniques.py`` tries the others."""
    from lightning_eff._core._needs.offers import refusal
    from lightning_eff._core.session import Session

    for strategy in (
        pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
        pl.strategies.FSDPStrategy(),
    ):
        technique = ALL[name].active()
        expected = refusal(name, technique.needs, technique.refuses, strategy)
        t = trainer(technique, max_steps=2)
        t._accelerator_connector.strategy = strategy
        if expected is not None:
            with pytest.raises(ValueError, match="strategy='ddp'") as error:
                Session.open(t, module(ALL[name].model), techniques_of(t), "fit")
            assert str(error.value) == expected


@every_and_stand_ins
def test_manual_optimization_works_or_is_refused(name: str) -> None:
    """Where it works, it acts, and looks at steps without updates: each batch has one."""
    technique = ALL[name].active()
    refused = ALL[name].refuses_manual
    if technique.needs_automatic_optimization if refused is None else refused:
        with pytest.raises(ValueError, match=rf"{name}.*: .* has automatic_optimization=False(; expected True|, so )"):
            _by_hand(ALL[name].model, technique)
        return
    net, t, updates = _by_hand(ALL[name].model, technique)
    assert t.global_step == updates == 6
    assert flat(net).isfinite().all()
    same = not differences(net.state_dict(), _plain_by_hand(ALL[name].model))
    assert same if ALL[name].exact else ALL[name].rounds or not same


def _by_hand(model: str, *techniques: Technique) -> tuple[pl.LightningModule, pl.Trainer, int]:
    """Train for six steps with manual optimization; also return how many updates changed weights."""
    pl.seed_everything(0, verbose=False)
    net, updates = module(model), 0
    net.automatic_optimization = False
    plain_step = net.training_step

    def manual_step(batch: Any, batch_idx: int) -> None:
        nonlocal updates
        optimizer: Any = net.optimizers()
        loss = plain_step(batch, batch_idx)
        optimizer.zero_grad()
        net.manual_backward(loss)
        before = flat(net).clone()
        optimizer.step()
        updates += not torch.equal(flat(net), before)

    net.training_step = manual_step
    t = trainer(*techniques, max_steps=6, accumulate_grad_batches=1)  # Lightning refuses others before techniques do
    t.fit(net, loader(model))
    return net, t, updates


@cache
def _plain_by_hand(model: str) -> dict[str, torch.Tensor]:
    return _by_hand(model)[0].state_dict()


# -- 7. afterwards everything is as it was


def _traces(net: pl.LightningModule, t: pl.Trainer, data: Any) -> dict[str, Any]:
    """What a technique could leave behind, apart from trained values."""
    found: dict[str, Any] = {
        "trainer": sorted(t.__dict__),
        "strategy": sorted(t.strategy.__dict__),
        "strategy methods": [
            name for name in ("setup", "load_checkpoint", "process_dataloader") if name in t.strategy.__dict__
        ],
        "loader": {key: id(value) for key, value in data.__dict__.items() if key in ("batch_sampler", "sampler")},
        "loader class": type(data),
        "grad enabled": torch.is_grad_enabled(),
    }
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    for path, m in net.named_modules():
        found[f"{path}: attributes"] = sorted(key for key in m.__dict__ if key != "forward")
        found[f"{path}: hooks"] = [len(getattr(m, name)) for name in hooks]
        found[f"{path}: children"] = {key: id(child) for key, child in m._modules.items()}
        found[f"{path}: training"] = m.training
    for path, p in net.named_parameters():
        found[f"{path}: parameter"] = (id(p), p.requires_grad, len(p._backward_hooks or ()))
    return found


class _Fails(nn.Module):
    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def forward(self, *args: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("planted")


def _failures(name: str) -> list[Any]:
    """At once and later: of the two failures one each time."""
    tried = (0, 7)[share_of(2, name, "failure")]
    return [pytest.param(name, at, marks=() if at == tried else pytest.mark.slow) for at in (0, 7)]


@pytest.mark.parametrize(
    ("name", "fails_after"),
    [one for name in (*NAMES, *sorted(STAND_INS), *sorted(EXAMPLES)) for one in _failures(name)],
    scope="module",
)
def test_leaves_no_trace(name: str, fails_after: int) -> None:
    """Neither a fit that fails nor one that ends, the one after the other, and a plain fit follows."""
    net, data = module(case_of(name).model), loader(case_of(name).model)
    if case_of(name).architecture:  # it stays changed, as it must be for what was trained
        lightning_eff.apply(net, case_of(name).active())  # pyright: ignore[reportArgumentType]
    called: Any = getattr(net, "model", net)  # what a step calls
    handle = called.register_forward_pre_hook(_Fails(10**9), with_kwargs=True)
    plain = trainer(max_steps=1)
    handle.remove()
    plain.fit(net, data)  # Lightning itself leaves attributes on the module and the strategy in its first fit
    for after in (fails_after, None):
        t = trainer(case_of(name).active(), max_steps=NUM_STEPS)
        handle = called.register_forward_pre_hook(_Fails(10**9 if after is None else after), with_kwargs=True)
        before = _traces(net, plain, data)
        with nullcontext() if after is None else pytest.raises(RuntimeError, match="planted"):
            t.fit(net, data)
        left = _traces(net, t, data)
        changed = {
            key: (was, left.get(key)) for key, was in before.items() if key != "trainer" and was != left.get(key)
        }
        assert changed == {}, f"fails after {after}"
        assert set(left["trainer"]) == set(before["trainer"])
        handle.remove()
    t = trainer(max_steps=2)
    t.fit(net, data)
    assert t.global_step == 2


@half_often([*NAMES, *sorted(STAND_INS), *sorted(EXAMPLES)], "again")
def test_the_same_callback_fits_again(name: str, undisturbed: Callable[[], Undisturbed]) -> None:
    run = undisturbed()
    again = fit(case_of(name).model, lambda: [run.technique])
    assert differences(run.final, final_state(*again)) == []


# -- 9. reports what it did


@every_and_stand_ins
def test_reports_to_the_logger(name: str, undisturbed: Callable[[], Undisturbed]) -> None:
    run = undisturbed()
    prefix = f"eff/{run.technique.name()}/"
    logged = {key: values for key, values in run.logged.items() if key.startswith("eff/")}
    assert logged
    assert all(key.startswith(prefix) for key in logged)
    assert set(run.reported) == {key.removeprefix(prefix) for key in logged}
    assert all(len(values) == NUM_STEPS for values in logged.values())
    assert len(run.summary) > 10


# -- what the classes say of themselves


@every
def test_describes_itself(name: str) -> None:
    cls = getattr(lightning_eff, name)
    assert cls.saves and cls.paper
    owner = next(base for base in cls.__mro__ if "control" in vars(base))
    assert owner is cls or owner.__name__ not in CASES, "another technique's control is not its own; a family's may be"
    assert isinstance(cls.control, Control) and len(cls.control.text) > 20 and "\n" not in cls.control.text
    assert cls.control.arms(CASES[name].neutral()) == {}
    arms = cls.control.arms(CASES[name].active())
    assert arms or "baseline" in cls.control.text, "no arm, and not said that the baseline is the control"
    assert any(year in cls.paper for year in map(str, range(1990, 2030)))
    assert "Raises:" in (cls.__doc__ or "")
    assert "Args:" in (cls.__doc__ or "") or not inspect.signature(cls).parameters
    assert (sys.modules[cls.__module__].__doc__ or "").strip()
