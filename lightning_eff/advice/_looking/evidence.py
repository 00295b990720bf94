"""The committed results of a technique on tasks like the user's."""

import re
from dataclasses import dataclass

from lightning_eff._catalogue.facts import facts
from lightning_eff._core.search_space import RunProfile

TASKS = {
    "GPT": "GPT on source text",
    "ViT": "ViT on noisy digits",
    "MLM": "masked language model on source text",
    "rings": "ViT on rings",
}
_RESULT = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\] (\w+)")


@dataclass(frozen=True)
class Result:
    """A committed result.

    Attributes:
        task: its short name, such as "GPT".
        settings: the settings and budget in words, such as "30 s, epsilon 0.05".
        speed: how many times as fast as its baseline the technique was.
        low: the lower end of the 95 % interval.
        high: the upper end.
        verdict: "faster", "slower" or "undecided".
    """

    task: str
    settings: str
    speed: float
    low: float
    high: float
    verdict: str

    def __str__(self) -> str:
        where = f"On {TASKS.get(self.task, self.task)}{f' ({self.settings})' if self.settings else ''}"
        interval = f"{self.speed:.2f} [{self.low:.2f}, {self.high:.2f}]"
        if self.verdict == "undecided":
            return f"{where} there was no measurable difference: {interval}."
        return f"{where} it was {self.verdict}: {interval} times as fast as the baseline to the same loss."


def kind(run: RunProfile) -> tuple[str, ...]:
    """The tasks that are like a run; none where no task is."""
    if run.image_side is not None:
        return ("ViT", "rings")
    if run.sequence_length is not None:
        return ("MLM",) if run.masked_labels else ("GPT",)
    return ()


def results(technique: str) -> list[Result]:
    """All committed results of a technique."""
    found: list[Result] = []
    for name, text in facts()["measured"].get(technique, {}).items():
        task, _, settings = name.partition(", ")
        match = _RESULT.match(text)
        if match is not None:
            found.append(Result(task, settings, float(match[1]), float(match[2]), float(match[3]), match[4]))
    return found


def evidence(technique: str, run: RunProfile) -> tuple[float | None, str]:
    """The expected speed of a technique on a run, and the results from which it follows, in words.

    The best of the settings that were tried on a task counts. Tasks like the run come first, and alone give the speed if there
    are any. A difference that was not shown counts as none.

    Args:
        technique: the name of its class.
        run: that it is for.
    """
    best: dict[str, Result] = {}
    for one in results(technique):
        if one.task not in best or _speed(one) > _speed(best[one.task]):
            best[one.task] = one
    like = [best[task] for task in kind(run) if task in best]
    if like:
        return _speed(like[0]), str(like[0])
    if not best:
        return None, "There is no committed evidence."
    others = sorted(best.values(), key=lambda one: -_speed(one))
    speeds = [_speed(one) for one in others]
    mean = 1.0
    for speed in speeds:
        mean *= speed ** (1 / len(speeds))
    return (
        mean,
        f"There is no committed evidence on a task like this one. {' '.join(map(str, others[:2]))}",
    )


def _speed(one: Result) -> float:
    return 1.0 if one.verdict == "undecided" else one.speed
