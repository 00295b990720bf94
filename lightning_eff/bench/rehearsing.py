"""Rehearse all arms: a few steps of each through its whole schedule, in turns, to calibrate its runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lightning_eff.bench import calibration
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.references import References, mean_cost

Record = dict[str, Any]
Rehearse = Callable[[list[Arm], str, int, Mapping[str, int], bool], list[Record]]


@dataclass(frozen=True)
class Rehearsing:
    """The rehearsals of a bench.

    Attributes:
        rehearse: a function that rehearses arms in turns and returns their records in the same order. Its arguments are the
            arms, a word for their files, the number of steps, the length of each arm's schedule by name, and whether to
            inspect model, data and learning rates.
        budget: the seconds of a run.
        rounds: the number of rounds in which all arms take turns.
        reference: the reference step costs; None uses those measured now.
        machine: the machine's fingerprint.
        other_training_data: whether arms may train on other data than the baseline.
    """

    rehearse: Rehearse
    budget: float
    rounds: int
    reference: References | None
    machine: Mapping[str, Any]
    other_training_data: bool

    def calibrated(self, baseline: Arm, others: Sequence[Arm]) -> dict[str, Record]:
        """Return each arm's step costs, steps, speeds and facts, or under "failed" the record of its failed rehearsal.

        Raises:
            RuntimeError: if the baseline fails.
            Incomparable: if the budget is too short, the baseline's learning rate does not decay, or an arm has other data.
        """
        arms = [baseline, *others]
        sweep = self._sweep(baseline)
        probes = self.rehearse(arms, "probe", sweep, {arm.name: sweep for arm in arms}, True)
        calibration.stop_if_failed(probes[0])
        found: dict[str, Record] = {}
        finished: dict[str, Record] = {}
        for arm, probe in zip(arms, probes, strict=True):
            if probe["status"] != "finished":
                found[arm.name] = {"failed": probe}
                continue
            calibration.check_same(arm.name, probes[0], probe, other_training_data=self.other_training_data)
            finished[arm.name] = probe
        scale = self._scale(baseline, probes[0])
        lengths = {name: self._steps(probe, calibration.prices([probe]), scale) for name, probe in finished.items()}
        blocks = self._in_rounds(arms, sweep, lengths, found)
        own = blocks[baseline.name]
        rates = {name: calibration.rates(own, blocks[name]) for name in blocks}
        prices = {name: calibration.tied(blocks[name], own, rates[name]) for name in blocks}
        if self.reference is not None:
            prices = self.reference.apply(baseline, self.machine, prices)
        for name in blocks:
            steps, probe = self._steps(blocks[name][0], prices[name]), finished[name]
            found[name] = {
                "steps": steps,
                "step_seconds": self.budget / steps,
                "same_training": name != baseline.name and calibration.same_training(probes[0], probe),
                "rates": [list(pair) for pair in rates[name]],
                "prices": prices[name],
                "lr": blocks[name][0]["lr"],
                "facts": {
                    **probe["facts"],
                    "samples a step": probe["samples"] / probe["steps"],
                    "techniques": probe["techniques"],
                },
            }
        return found

    def _sweep(self, baseline: Arm) -> int:
        """Return the number of steps of a rehearsal, from the time of the baseline's first steps."""
        first = self.rehearse([baseline], "first", 8, {baseline.name: 8}, False)[0]
        calibration.stop_if_failed(first)
        batch = median(first["times"][2:])
        if self.reference is not None:  # the present speed of the machine does not matter
            known = self.reference.known(baseline, self.machine, calibration.prices([first]))
            batch = mean_cost(known) if known else batch
        step = batch * len(first["times"]) / first["steps"]
        calibration.check_length(baseline.name, self.budget, step)
        return calibration.sweep_steps(self.budget, step)

    def _scale(self, baseline: Arm, probe: Record) -> float:
        """Return the ratio of the baseline's reference step cost to the measured one; 1 without a reference.

        The reference determines the number of steps of a run. On a busy or slow machine, a schedule from measured times would
        be shorter than the run.
        """
        if self.reference is None:
            return 1.0
        now = calibration.prices([probe])
        known = self.reference.known(baseline, self.machine, now)
        return mean_cost(known) / mean_cost(now) if known else 1.0

    def _steps(self, record: Record, prices: Sequence[Mapping[str, Any]], scale: float = 1.0) -> int:
        """Return the number of steps in the budget."""
        return calibration.steps_in(self.budget, record, {price["kind"]: price["seconds"] * scale for price in prices})

    def _in_rounds(
        self, arms: Sequence[Arm], sweep: int, lengths: dict[str, int], found: dict[str, Record]
    ) -> dict[str, list[Record]]:
        """Return the records of the arms that finish every round. Others move from ``lengths`` to ``found``."""
        baseline = arms[0]
        blocks: dict[str, list[Record]] = {name: [] for name in lengths}
        for number in range(1, self.rounds + 1):
            able = [arm for arm in arms if arm.name in lengths]
            first = number % len(able)
            able = able[first:] + able[:first]  # another arm begins each time
            records = self.rehearse(able, f"round{number}", sweep, lengths, False)
            for arm, record in zip(able, records, strict=True):
                if record["status"] != "finished":
                    found[arm.name] = {"failed": record}
                    del lengths[arm.name], blocks[arm.name]
                else:
                    blocks[arm.name].append(record)
            if baseline.name not in lengths:
                calibration.stop_if_failed(found[baseline.name]["failed"])
            if number == 1:
                calibration.check_rate(baseline.name, blocks[baseline.name][0]["lr"], lengths[baseline.name])
        return blocks
