"""Step costs and speed verdicts from rehearsals, on synthetic machines with known noise."""

import random
import statistics
from collections.abc import Callable, Iterable

import pytest

from lightning_eff.bench import calibration
from lightning_eff.bench.pace import Incomparable
from lightning_eff.bench.reports.intervals import paired_ratio


def block(times: list[float], kinds: list[str] | None = None, **more) -> dict:
    kinds = kinds or ["a"] * len(times)
    return {"kinds": kinds, "times": times, "samples": 8 * len(times), "steps": len(times), **more}


def machine(seed: int, count: int = 2, rounds: int = 8, steps: int = 32) -> Callable[[list[float]], list[list[dict]]]:
    """Rehearsals of arms in turns of 4 steps on a busy machine, from the arms' true seconds a step.

    Its speed drifts by a random walk, which all arms of a round see alike; single steps are lifted by a tenth of them
    by up to three times.
    """
    rng = random.Random(seed)

    def measure(true: list[float]) -> list[list[dict]]:
        told: list[list[dict]] = [[] for _ in true]
        speed = 1.0
        for _ in range(rounds):
            times: list[list[float]] = [[] for _ in true]
            for _ in range(steps // 4):
                for own, seconds in zip(times, true, strict=True):
                    speed = min(max(speed * rng.gauss(1, 0.03), 0.5), 2.0)
                    for _ in range(4):
                        spike = rng.uniform(1, 3) if rng.random() < 0.1 else 1.0
                        own.append(seconds * speed * rng.gauss(1, 0.03) * spike)
            for arm, own in zip(told, times, strict=True):
                arm.append(block(own))
        return told

    return measure


def ratio(seed: int, slower: float):
    base, arm = machine(seed)([0.01, 0.01 * slower])
    return paired_ratio(calibration.rates(base, arm))


def test_two_copies_show_no_difference() -> None:
    """Over 20 repetitions the interval covers 1.0 in at least 17."""
    assert sum(not ratio(seed, 1.0).excludes(1.0) for seed in range(20)) >= 17


def test_finds_a_slow_down_of_a_fifth_and_a_speed_up_of_a_tenth() -> None:
    assert sum(ratio(seed, 1.2).high < 1 for seed in range(20)) >= 19
    assert sum(ratio(seed, 1 / 1.1).low > 1 for seed in range(20)) >= 17
    assert ratio(0, 1.2).estimate == pytest.approx(1 / 1.2, rel=0.05)


def test_the_estimate_is_right_on_average() -> None:
    estimates = [ratio(seed, 1.25).estimate for seed in range(40)]
    assert sum(estimates) / 40 == pytest.approx(0.8, rel=0.01)


def test_slow_steps_that_come_back_count_and_the_machines_own_do_not() -> None:
    """A delay in every eighth step is the arm's own: 0.01 + 0.04 * 4 / 31. One in a single rehearsal is not."""
    plain = [block([0.01] * 32) for _ in range(5)]
    recurring = [block([0.05 if i % 8 == 3 else 0.01 for i in range(1, 33)]) for _ in range(5)]
    once = [*plain[:4], block([0.01] * 20 + [0.5] * 5 + [0.01] * 7)]
    for arm, seconds in ((recurring, 0.01 + 0.04 * 4 / 31), (once, 0.01)):
        pairs = calibration.rates(plain, arm)
        assert paired_ratio(pairs).estimate == pytest.approx(0.01 / seconds, rel=1e-6)
        assert calibration.tied(arm, plain, pairs)[0]["seconds"] == pytest.approx(seconds, rel=1e-6)


def periodic(seed: int, rounds: int, slower: float, every: int = 10) -> float:
    """The estimate for an arm of which each tenth step is slower, among 60 of a noisy machine."""
    base, arm = machine(seed, rounds=rounds, steps=60)([0.01, 0.01])
    for one in arm:
        one["times"] = [seconds * (slower if at % every == 0 else 1.0) for at, seconds in enumerate(one["times"])]
    return paired_ratio(calibration.rates(base, arm)).estimate


@pytest.mark.parametrize("rounds", [2, 3, 6])
def test_steps_that_are_slow_each_time_count_with_few_rounds_and_noise(rounds: int) -> None:
    """What is done in every tenth step and doubles it is a tenth of the time; over 40 repetitions, its mean."""
    found = [periodic(seed, rounds, 2.0) for seed in range(40)]
    true = 59 / (59 + 5)  # the first of 60 steps, one of the slow ones, does not count
    assert sum(found) / 40 == pytest.approx(true, rel=0.01)
    assert sum(periodic(seed, rounds, 1.0) for seed in range(40)) / 40 == pytest.approx(1.0, rel=0.01)


def test_slow_steps_are_those_of_all_rehearsals_of_the_same_steps() -> None:
    one, other = ([0.01, 0.01, 0.03, 0.01, 0.01, 0.03, 0.01, 0.01], [0.01, 0.02, 0.03, 0.01, 0.01, 0.01, 0.01, 0.01])
    assert calibration.slow_steps([block(one), block(other)]) == {2}
    assert calibration.slow_steps([block(one)]) == frozenset()
    assert calibration.slow_steps([block(one), block(one, ["a"] * 7 + ["b"])]) == frozenset()


def one_rehearsal(seed: int, slower: float, every: int = 10, steps: int = 96) -> float:
    """The price told by one rehearsal on a noisy machine with slow steps, in that of the same one without."""
    ((plain,),) = machine(seed, rounds=1, steps=steps)([0.01])
    times = [seconds * (slower if at % every == 0 else 1.0) for at, seconds in enumerate(plain["times"])]
    (price,), (usual,) = calibration.prices_of_one({**plain, "times": times}), calibration.prices([plain])
    return price["seconds"] / usual["seconds"]


@pytest.mark.parametrize(("slower", "every", "steps"), [(3.0, 10, 96), (2.0, 10, 96), (3.0, 5, 48), (3.0, 4, 96)])
def test_one_rehearsal_tells_steps_that_come_back(slower: float, every: int, steps: int) -> None:
    """A step of ``every`` takes ``slower`` times as long, and the first of all, one of these, does not count."""
    found = [one_rehearsal(seed, slower, every, steps) for seed in range(20)]
    slow = len(range(0, steps, every)) - 1
    assert statistics.median(found) == pytest.approx(1 + (slower - 1) * slow / (steps - 1), rel=0.02)


def test_one_rehearsal_on_a_noisy_machine_makes_up_no_slow_steps() -> None:
    assert sum(one_rehearsal(seed, 1.0) != pytest.approx(1.0) for seed in range(200)) <= 4
    assert sum(one_rehearsal(seed, 1.0, steps=24) != pytest.approx(1.0) for seed in range(200)) <= 4


def test_slow_steps_come_back_throughout() -> None:
    def found(places: Iterable[int], steps: int = 40) -> frozenset[int]:
        return calibration.periodic_steps(block([0.03 if at in {*places} else 0.01 for at in range(steps)]))

    assert found(range(0, 40, 10)) == {10, 20, 30} and found(range(7, 40, 8)) == set(range(7, 40, 8))
    assert found([*range(7, 40, 8), 5, 30]) == set(range(7, 40, 8)), "two of the machine's beside them"
    assert found([7, 15, 23, 31]) == frozenset(), "it stopped"
    assert found([10, 30]) == frozenset() and found(range(0)) == frozenset()
    assert found(range(20, 40)) == frozenset(), "the second half of them is no period"


def test_first_steps_are_left_out_where_there_are_others() -> None:
    """The first of all starts the loader; the first of a kind that is far slower than the next compiles."""
    kinds = ["a", "a", "b", "b", "c", "c"]
    told = calibration.prices([block([1.0, 0.1, 5.0, 0.2, 0.3, 0.3], kinds)])
    assert {price["kind"]: price["seconds"] for price in told} == pytest.approx({"a": 0.1, "b": 0.2, "c": 0.3})


def test_prices_stand_to_the_baselines_as_the_paired_speeds_do() -> None:
    base = [block([0.01 * speed] * 9) for speed in (1, 2, 4)]
    arm = [block([0.02 * speed] * 9) for speed in (1, 2, 5)]
    pairs = calibration.rates(base, arm)
    (price,) = calibration.tied(arm, base, pairs)
    (unit,) = calibration.prices(base)
    assert price["seconds"] / unit["seconds"] == pytest.approx(paired_ratio([(b, a) for a, b in pairs]).estimate)
    assert calibration.tied(base, base, [(x, x) for x, _ in pairs])[0]["seconds"] == pytest.approx(unit["seconds"])


def test_how_many_steps_a_budget_holds() -> None:
    """Half of the budget at 0.1 s a step and half at 0.3 s: 10 / 2 / 0.1 + 10 / 2 / 0.3 steps."""
    prices = {"a": 0.1, "b": 0.3}
    sweep = block([0.1] * 16 + [0.3] * 16, ["a"] * 16 + ["b"] * 16)
    assert calibration.steps_in(10.0, sweep, prices) == round(50 + 5 / 0.3)
    accumulates = {**sweep, "steps": 16}
    assert calibration.steps_in(10.0, accumulates, prices) == round((50 + 5 / 0.3) / 2)


def test_a_rehearsal_is_a_twentieth_of_a_run_within_bounds() -> None:
    assert calibration.sweep_steps(60, 0.05) == 60
    assert calibration.sweep_steps(1, 0.05) == 24 and calibration.sweep_steps(1000, 0.01) == 96
    assert calibration.sweep_steps(1, 0.02) == 50 and calibration.sweep_steps(1, 0.001) == 96


def test_refuses_budgets_and_rates() -> None:
    with pytest.raises(Incomparable, match=r"10.0 optimizer steps.*Raise --budget to 2s"):
        calibration.check_length("x", 1.0, 0.1)
    calibration.check_length("x", 2.0, 0.1)
    with pytest.raises(Incomparable, match="still rises at 60%"):
        calibration.check_rate("x", {"peak": 1.0, "last": 0.0, "peak_at": 0.6}, 100)
    with pytest.raises(Incomparable, match="ends at 11% of its peak after the 100"):
        calibration.check_rate("x", {"peak": 1.0, "last": 0.11, "peak_at": 0.1}, 100)
    calibration.check_rate("x", {"peak": 1.0, "last": 0.1, "peak_at": 0.1}, 100)


def test_what_makes_two_rehearsals_the_same_training() -> None:
    one = {"losses": [1.0], "metrics": {"v": 2.0}, "samples": 3, "tokens": 0, "techniques": [], "steps": 1}
    assert calibration.same_training(one, dict(one))
    for name, other in (("losses", [1.0 + 1e-12]), ("metrics", {"v": 2.1}), ("samples", 4), ("techniques", ["T()"])):
        assert not calibration.same_training(one, {**one, name: other}), name
    assert not calibration.same_training({**one, "losses": []}, {**one, "losses": []})


def test_other_training_data_are_no_option_where_nobody_can_allow_them() -> None:
    """A search has no ``--allow-other-training-data``."""
    baseline = {"data": {"validation": {}, "training": {"length": 512, "items": "a" * 8}}}
    arm = {"data": {"validation": {}, "training": {"length": 640, "items": "b" * 8}}}
    with pytest.raises(Incomparable, match=r"640 items .* Give every arm the same data\.$"):
        calibration.check_same("arm", baseline, arm, other_training_data=None)
    with pytest.raises(Incomparable, match="with --allow-other-training-data"):
        calibration.check_same("arm", baseline, arm, other_training_data=False)
    calibration.check_same("arm", baseline, arm, other_training_data=True)
