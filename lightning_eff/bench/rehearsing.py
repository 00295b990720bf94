"""Rehearsals: a few steps of every arm that pass through the whole schedule, in turns, and what follows for its runs."""

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
    """What the rehearsals of a bench are made by.

    Attributes:
        rehearse: lets arms rehearse, in turns, and gives their records in the same order. It is given the arms, a word
            for their files, how many steps each makes, the steps of the schedule that these pass through, by the arm's
            name, and whether to look at the arm's model, data and rates as well.
        budget: seconds of a run.
        rounds: in which all arms take turns.
        reference: the prices that the budget counts in; None for those of this machine, now.
        machine: its fingerprint.
        other_training_data: arms may train on other data than the baseline.
    """

    rehearse: Rehearse
    budget: float
    rounds: int
    reference: References | None
    machine: Mapping[str, Any]
    other_training_data: bool

    def calibrated(self, baseline: Arm, others: Sequence[Arm]) -> dict[str, Record]:
        """Of each arm its prices, steps, rates and facts; or, under "failed", the record of the rehearsal that failed.

        Raises:
            RuntimeError: if the baseline fails.
            Incomparable: if the budget is too short, the baseline's rate is not decayed in it, or an arm has other data.
        """
        arms = [baseline, *others]
        sweep = self._sweep(baseline)
        probes = self.rehearse(arms, "probe", sweep, {arm.name: sweep for arm in arms}, True)
        calibration.stop_if_failed(probes[0])
        found: dict[str, Record] = {}
        told: dict[str, Record] = {}
        for arm, probe in zip(arms, probes, strict=True):
            if probe["status"] != "finished":
                found[arm.name] = {"failed": probe}
                continue
            calibration.check_same(arm.name, probes[0], probe, other_training_data=self.other_training_data)
            told[arm.name] = probe
        scale = self._scale(baseline, probes[0])
        lengths = {name: self._steps(probe, calibration.prices([probe]), scale) for name, probe in told.items()}
        blocks = self._in_rounds(arms, sweep, lengths, found)
        own = blocks[baseline.name]
        rates = {name: calibration.rates(own, blocks[name]) for name in blocks}
        prices = {name: calibration.tied(blocks[name], own, rates[name]) for name in blocks}
        if self.reference is not None:
            prices = self.reference.apply(baseline, self.machine, prices)
        for name in blocks:
            steps, probe = self._steps(blocks[name][0], prices[name]), told[name]
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
        """How many steps a rehearsal makes, from the time of the baseline's first ones."""
        first = self.rehearse([baseline], "first", 8, {baseline.name: 8}, False)[0]
        calibration.stop_if_failed(first)
        batch = median(first["times"][2:])
        if self.reference is not None:  # what a step costs, whatever it takes just now
            known = self.reference.known(baseline, self.machine, calibration.prices([first]))
            batch = mean_cost(known) if known else batch
        step = batch * len(first["times"]) / first["steps"]
        calibration.check_length(baseline.name, self.budget, step)
        return calibration.sweep_steps(self.budget, step)

    def _scale(self, baseline: Arm, probe: Record) -> float:
        """The baseline's price by the reference, in times of what its step has just taken; 1 where there is no reference.

        A run has as many steps as the reference's prices say; on a machine that is busy now, or slower, a schedule that
        was laid out by what steps take here would be shorter than the run's.
        """
        if self.reference is None:
            return 1.0
        now = calibration.prices([probe])
        known = self.reference.known(baseline, self.machine, now)
        return mean_cost(known) / mean_cost(now) if known else 1.0

    def _steps(self, record: Record, prices: Sequence[Mapping[str, Any]], scale: float = 1.0) -> int:
        """How many steps the budget holds."""
        return calibration.steps_in(self.budget, record, {price["kind"]: price["seconds"] * scale for price in prices})

    def _in_rounds(
        self, arms: Sequence[Arm], sweep: int, lengths: dict[str, int], found: dict[str, Record]
    ) -> dict[str, list[Record]]:
        """The records of those arms that finish every round; those that do not go into ``found`` and out of ``lengths``."""
        baseline = arms[0]
        blocks: dict[str, list[Record]] = {name: [] for name in lengths}
        for number in range(1, self.rounds + 1):
            able = [arm for arm in arms if arm.name in lengths]
            first = number % len(able)
            able = able[first:] + able[:first]  # another one is set up and begins first each time
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
