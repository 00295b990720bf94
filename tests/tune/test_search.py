"""The search by itself, on objectives of closed form: what it finds, what it learns, and that it goes on where it was."""

import itertools
import math
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform
from lightning_eff.tune import search as searching
from lightning_eff.tune.config import Choices
from lightning_eff.tune.outcomes import Outcome, refusals
from lightning_eff.tune.own import Own
from lightning_eff.tune.proposals.proposing import Proposer, Trial, refreshed
from lightning_eff.tune.search import Search, chosen
from lightning_eff.tune.space import Candidate, Space

pytest.importorskip("optuna")


class A(Callback):
    conflicts = {"B": "they clash"}


class B(Callback): ...


class C(Callback): ...


class D(Callback): ...


CLASSES = {"A": A, "B": B, "C": C, "D": D}
RATE = Own("rate", Uniform(1e-4, 1.0, log=True), 0.5, "model.init_args.lr")


def space(names: str = "ABCD", most: int = 3) -> Space:
    settings = {"x": Uniform(0.0, 1.0), "mode": Choice((None, "b", (1, 2)))}
    return Space(
        own=(RATE,),
        own_left_out={},
        techniques={name: Candidate(name, CLASSES[name], SearchSpace(settings)) for name in names},
        left_out={},
        most=most,
        profile=RunProfile(),
    )


class Objective:
    """The rate's best is 0.01; A halves what is left to gain, C does harm, D is refused with A; longer runs are better."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.runs: list[tuple[str, float]] = []
        self.stop_at = stop_at

    def __call__(self, choices: Choices, budget: float) -> Outcome:
        if self.stop_at is not None and len(self.runs) >= self.stop_at:
            raise KeyboardInterrupt
        self.runs.append((choices.key, budget))
        names = set(choices.techniques)
        if {"A", "D"} <= names:
            return Outcome(None, "A and D do not fit", refused=True)
        rate = choices.own["rate"]
        if rate > 0.9:
            return Outcome(None, "the loss is nan")
        value = 1.0 + abs(math.log10(rate / 0.01)) / 10 + 0.1 / budget
        value -= 0.3 * (1 - abs(choices.techniques["A"]["x"] - 0.5)) if "A" in names else 0.0
        return Outcome(value + (0.2 if "C" in names else 0.0))


def make(folder: Path, run: Any, limit: int = 15, **more: Any) -> Search:
    return Search(more.pop("of", space()), run, folder, mode="min", budget=9.0, seconds=1e6, limit=limit, **more)


def test_what_pays_is_found_and_what_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    run = Objective()
    search = make(tmp_path, run, 20)
    search.search()
    best, baseline = search.best("recipes"), search.best("baseline")
    assert best is not None and baseline is not None
    assert "A" in best["choices"]["techniques"] and "C" not in best["choices"]["techniques"]
    assert best["value"] < baseline["value"] - 0.2 and baseline["value"] < 1.15
    counts = {kind: len(search._counted(kind)) for kind in searching.KINDS}
    assert counts == {"baseline": 20, "recipes": 20}, "the baseline has as many trials"
    assert all(not record["choices"]["techniques"] for record in search.trials("baseline"))
    refused = [r for r in search.trials("recipes") if {"A", "D"} <= set(r["choices"]["techniques"]) and not r["free"]]
    assert len(refused) <= 2, "one that was begun before the first refusal was known"
    assert all(len(r["choices"]["techniques"]) <= 3 for r in search.trials("recipes") if not r["free"])
    assert not any({"A", "B"} <= set(r["choices"]["techniques"]) and not r["free"] for r in search.trials("recipes"))
    assert search.trials("baseline")[0]["choices"]["own"] == {"rate": 0.5}, "first the config as it is"


def test_recipes_begin_with_what_was_measured_to_pay(tmp_path: Path) -> None:
    """The best alone, then with the next that fits it, then the others alone; what costs is drawn seldom."""

    def measured(**values: float) -> Space:
        one = space()
        found = {
            name: replace(candidate, space=replace(candidate.space, measured=values[name]))
            for name, candidate in one.techniques.items()
        }
        return replace(one, techniques=found)

    search = make(tmp_path, Objective(), 8, of=measured(A=1.2, B=2.0, C=0.1, D=1.5))
    search.search()
    stacks = [sorted(record["choices"]["techniques"]) for record in search.trials("recipes")]
    assert stacks[:4] == [["B"], ["B", "D"], ["D"], ["A"]], "A and B clash, by what A says"

    kinds = measured(A=1.2, B=2.0, C=0.1, D=1.5)
    of_two = replace(kinds.techniques["B"].space, settings={"how": Choice(("one", "other"), each=True)})
    techniques = {**kinds.techniques, "B": replace(kinds.techniques["B"], space=of_two)}
    proposer = Proposer(replace(kinds, techniques=techniques), "min", 0)
    begun = [proposer.drawn("recipes", number, None, {}).techniques for number in range(5)]
    assert [sorted(stack) for stack in begun] == [["B"], ["B"], ["B", "D"], ["D"], ["A"]]
    assert [stack["B"]["how"] for stack in begun[:3]] == ["one", "other", "one"], "both kinds alone"

    def drawn(most: float) -> int:
        proposer = Proposer(measured(A=1.2, B=2.0, C=most, D=1.5), "min", 0)
        return sum("C" in proposer.drawn("recipes", number, None, {}).techniques for number in range(4, 404))

    assert 0 < drawn(0.1) < 0.5 * drawn(1.0)


def test_what_leads_is_tried_again_on_what_the_baseline_has_since_found(tmp_path: Path) -> None:
    """Once the starts are over, a recipe that leads on settings of the baseline that were since bettered is not left there."""
    search = make(tmp_path, Objective(), searching.STARTUP)
    search.search()
    leading, best = search.best("recipes"), search.best("baseline")
    assert leading is not None and best is not None and leading["choices"]["own"] != best["choices"]["own"]
    further = make(tmp_path, Objective(), searching.STARTUP + 1)
    further.search()
    last = further.trials("recipes")[-1]
    assert last["choices"] == {"own": best["choices"]["own"], "techniques": leading["choices"]["techniques"]}
    assert last["value"] < leading["value"]
    many = make(tmp_path, Objective(), searching.STARTUP + 6)
    many.search()
    again = [record for record in many.trials("recipes") if record["choices"] == last["choices"]]
    assert len(again) == 1, "once"


def test_what_leads_is_not_tried_again_where_its_settings_are_its_own() -> None:
    first, second = {"rate": 0.5}, {"rate": 0.1}
    leading, baselines = Choices(first, {"A": {"x": 0.5}}), [Choices(first), Choices(second)]
    assert refreshed(leading, baselines[1], baselines, [leading]) == Choices(second, {"A": {"x": 0.5}})
    assert refreshed(leading, baselines[0], baselines, [leading]) is None, "it leads on the best there are"
    assert refreshed(Choices({"rate": 0.3}, {"A": {}}), baselines[1], baselines, []) is None, (
        "the sampler chose its rate"
    )
    assert refreshed(leading, baselines[1], baselines, [Choices(second, {"A": {"x": 0.5}})]) is None, "it was tried"


def test_few_trials_get_the_whole_budget(tmp_path: Path) -> None:
    run = Objective()
    search = make(tmp_path, run)
    search.search()
    budgets = [budget for _, budget in run.runs]
    ninth, third, whole = (budgets.count(b) for b in (1.0, 3.0, 9.0))
    assert ninth > 1.5 * third > 1.5 * whole > 0
    left = [r for r in search.trials() if r["state"] == "pruned" and r["values"]]
    assert left and all("not in the best third at 1/" in r["why"] for r in left if not r["refused"])
    assert len(set(run.runs)) == len(run.runs), "nothing is run twice"


@pytest.mark.parametrize("stop_at", [0, 11])
def test_a_search_that_was_killed_goes_on_with_the_same_trials(tmp_path: Path, stop_at: int) -> None:
    whole = Objective()
    straight = make(tmp_path / "straight", whole, 11)
    straight.search()
    first = Objective(stop_at)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "killed", first, 11).search()
    second = Objective()
    again = make(tmp_path / "killed", second, 11)
    again.search()
    assert first.runs + second.runs == whole.runs
    assert again.trials() == straight.trials()


class Late(Objective):
    """The same, but runs last for times that have nothing to do with their order."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__(stop_at)
        self._lock, self.most = threading.Lock(), 0
        self._now = 0

    def __call__(self, choices: Choices, budget: float) -> Outcome:
        with self._lock:
            outcome = super().__call__(choices, budget)
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.1 if int(choices.key, 16) % 3 == 0 else 0.0)
        with self._lock:
            self._now -= 1
        return outcome


@pytest.mark.parametrize("jobs", [2, 4])
def test_trials_are_the_same_however_many_run_at_once(
    tmp_path: Path, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is proposed, how far each comes and why it ends do not depend on which run ends first."""
    monkeypatch.setattr(searching, "_ahead", lambda jobs: 8)
    serial, several = make(tmp_path / "1", Objective(), 14), make(tmp_path / "2", run := Late(), 14, jobs=jobs)
    serial.search()
    several.search()
    assert run.most == jobs, "they did run side by side"
    assert several.trials() == serial.trials()
    assert len(set(run.runs)) == len(run.runs)


def test_a_trial_is_held_against_one_that_was_begun_before_it_and_is_slower(tmp_path: Path) -> None:
    def run(choices: Choices, budget: float) -> Outcome:
        first = choices.own["rate"] == 0.5
        time.sleep(0.3 if first else 0.0)
        return Outcome(0.0 if first else 1.0)

    search = make(tmp_path, run, 2, jobs=3, of=space(""))
    search.search()
    assert [sorted(trial["values"]) for trial in search.trials("baseline")] == [["1/1", "1/3", "1/9"], ["1/9"]]


def test_trials_side_by_side_that_were_killed_go_on_as_the_same(tmp_path: Path) -> None:
    straight = make(tmp_path / "straight", Objective(), 9)
    straight.search()
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "killed", Late(15), 9, jobs=2).search()
    again = make(tmp_path / "killed", Late(), 9, jobs=2)
    again.search()
    assert again.trials() == straight.trials()


def test_a_machine_with_many_devices_has_something_for_each(tmp_path: Path) -> None:
    together, plain, begun = threading.Barrier(6), Objective(), itertools.count()

    def run(choices: Choices, budget: float) -> Outcome:
        if next(begun) < 6:
            together.wait(timeout=20)  # breaks, if fewer are under way
        return plain(choices, budget)

    search = make(tmp_path, run, 4, jobs=6)
    search.search()
    assert all(len(search._counted(kind)) == 4 for kind in searching.KINDS)


def test_time_ends_a_search_after_one_trial_of_each_at_least(tmp_path: Path) -> None:
    run = Objective()
    search = Search(space(), run, tmp_path, mode="min", budget=9.0, seconds=0.0)
    search.search()
    assert [len(search._counted(kind)) for kind in searching.KINDS] == [1, 1]
    assert search.spent > 0


def test_a_module_that_diverges_in_every_trial_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"None of the baseline's 4 trials trained for the whole budget; the last reason: the loss is nan",
    ):
        make(tmp_path, lambda choices, budget: Outcome(None, "the loss is nan"), 4).search()
    with pytest.raises(RuntimeError, match=r"the target is nan"):
        make(tmp_path / "nan", lambda choices, budget: Outcome(math.nan), 2).search()


@pytest.mark.parametrize(
    ("ends", "advice"),
    [
        (Outcome(None, "the loss is nan"), "Set lower learning rates"),
        (Outcome(None, "it used 3 GiB, more than the limit of 2 GiB"), "Raise --memory"),
        (Outcome(None, "crashed: KeyError", crashed=True), "Fix this error"),
        (Outcome(None, "it has other data", refused=True), "Fix this error"),
    ],
)
def test_what_may_help_goes_by_why_the_baseline_came_to_no_end(ends: Outcome, advice: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=rf"the last reason: {ends.why}\. {advice}"):
        make(tmp_path, lambda choices, budget: ends, 2).search()


def test_a_search_in_which_every_stack_is_refused_ends(tmp_path: Path) -> None:
    run = Objective()

    def refusing(choices: Choices, budget: float) -> Outcome:
        return Outcome(None, "never", refused=True) if choices.techniques else run(choices, budget)

    search = make(tmp_path, refusing, 3, of=space("AC"))
    search.search()
    assert len(search.ranked("recipes")) == 0 and search.best("baseline") is not None
    tried = [(trial.place, frozenset(trial.choices.techniques)) for trial in search._all if trial.refused]
    assert tried and not any(
        stack <= other and later >= place + searching.AHEAD for place, stack in tried for later, other in tried
    ), "each refusal is learnt"


def test_a_stack_is_given_up_when_it_was_refused_or_crashed_with_two_settings(tmp_path: Path) -> None:
    """A crash may be the batch's, and says nothing of the stack; a refused baseline bars nothing."""

    def ended(rate: float, *names: str, **how: Any) -> Trial:
        choices = Choices({"rate": rate}, {name: {"x": 0.5, "mode": None} for name in names})
        kind = "recipes" if names else "baseline"
        return Trial(kind, 0, 0, {}, choices, state="pruned", why=f"{names} {rate}", **how)

    refused = ended(0.1, "D", refused=True)
    crashed = [ended(rate, "C", crashed=True) for rate in (0.1, 0.1, 0.2)]
    none = [ended(0.1, refused=True), ended(0.1, crashed=True), ended(0.2, crashed=True), ended(0.1, "A")]
    assert refusals([refused, *crashed[:2], *none]) == {frozenset("D"): "('D',) 0.1"}
    assert refusals([refused, *crashed, *none]).keys() == {frozenset("C"), frozenset("D")}
    search = make(tmp_path, lambda choices, budget: Outcome(None, "crashed", crashed=True), 1, of=space("A"))
    with pytest.raises(RuntimeError, match="None of the baseline's"):
        search.search()
    assert all(trial.crashed and not trial.refused for trial in search._all if not trial.free)


def test_without_techniques_the_baseline_alone_is_tuned(tmp_path: Path) -> None:
    search = make(tmp_path, Objective(), 5, of=space(""))
    search.search()
    assert len(search.trials("baseline")) == 5 and not search.trials("recipes")


def test_choices_come_back_from_a_record(tmp_path: Path) -> None:
    search = make(tmp_path, Objective(), 3)
    search.search()
    for record in search.trials("recipes"):
        assert chosen(record).record() == record["choices"]


def test_a_missing_optuna_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModuleNotFoundError, match=r"optuna is not installed.*pip install .*\.\[tune\]"):
        searching.require_extra()
