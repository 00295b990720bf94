"""Sub-policies: those that the authors of AutoAugment published (Cubuk et al. 2018, tables 7 to 9), and your own."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Kind, Number, Refused
from lightning_eff.data.augmentation.images._operations import OPERATIONS

LEVELS = 9  # the largest of the ten strengths, which begin at 0


class Done(NamedTuple):
    """An operation of a sub-policy.

    Attributes:
        name: the name of the operation.
        p: the probability that it is applied.
        level: its strength, from 0 to 9. None if it has no strength.
    """

    name: str
    p: float
    level: float | None


SubPolicy = tuple[Done, Done]


def _table(text: str) -> tuple[SubPolicy, ...]:
    """Parse sub-policies, one per line: two operations, each with its probability in tenths and its strength or ``-``."""

    def done(name: str, tenths: str, level: str) -> Done:
        return Done(name, int(tenths) / 10, None if level == "-" else int(level))

    rows = (line.split() for line in text.strip().splitlines())
    return tuple((done(*row[:3]), done(*row[3:])) for row in rows)


TABLES: dict[str, tuple[SubPolicy, ...]] = {
    "imagenet": _table("""
        posterize 4 8 rotate 6 9
        solarize 6 5 auto_contrast 6 -
        equalize 8 - equalize 6 -
        posterize 6 7 posterize 6 6
        equalize 4 - solarize 2 4
        equalize 4 - rotate 8 8
        solarize 6 3 equalize 6 -
        posterize 8 5 equalize 10 -
        rotate 2 3 solarize 6 8
        equalize 6 - posterize 4 6
        rotate 8 8 color 4 0
        rotate 4 9 equalize 6 -
        equalize 0 - equalize 8 -
        invert 6 - equalize 10 -
        color 6 4 contrast 10 8
        rotate 8 8 color 10 2
        color 8 8 solarize 8 7
        sharpness 4 7 invert 6 -
        shear_x 6 5 equalize 10 -
        color 4 0 equalize 6 -
        equalize 4 - solarize 2 4
        solarize 6 5 auto_contrast 6 -
        invert 6 - equalize 10 -
        color 6 4 contrast 10 8
        equalize 8 - equalize 6 -
    """),
    "cifar10": _table("""
        invert 1 - contrast 2 6
        rotate 7 2 translate_x 3 9
        sharpness 8 1 sharpness 9 3
        shear_y 5 8 translate_y 7 9
        auto_contrast 5 - equalize 9 -
        shear_y 2 7 posterize 3 7
        color 4 3 brightness 6 7
        sharpness 3 9 brightness 7 9
        equalize 6 - equalize 5 -
        contrast 6 7 sharpness 6 5
        color 7 7 translate_x 5 8
        equalize 3 - auto_contrast 4 -
        translate_y 4 3 sharpness 2 6
        brightness 9 6 color 2 8
        solarize 5 2 invert 0 -
        equalize 2 - auto_contrast 6 -
        equalize 2 - equalize 6 -
        color 9 9 equalize 6 -
        auto_contrast 8 - solarize 2 8
        brightness 1 3 color 7 0
        solarize 4 5 auto_contrast 9 -
        translate_y 9 9 translate_y 7 9
        auto_contrast 9 - solarize 8 3
        equalize 8 - invert 1 -
        translate_y 7 9 auto_contrast 9 -
    """),
    "svhn": _table("""
        shear_x 9 4 invert 2 -
        shear_y 9 8 invert 7 -
        equalize 6 - solarize 6 6
        invert 9 - equalize 6 -
        equalize 6 - rotate 9 3
        shear_x 9 4 auto_contrast 8 -
        shear_y 9 8 invert 4 -
        shear_y 9 5 solarize 2 6
        invert 9 - auto_contrast 8 -
        equalize 6 - rotate 9 3
        shear_x 9 4 solarize 3 3
        shear_y 8 8 invert 7 -
        equalize 9 - translate_y 6 6
        invert 9 - equalize 6 -
        contrast 3 3 rotate 8 4
        invert 8 - translate_y 0 2
        shear_y 7 6 solarize 4 8
        invert 6 - rotate 8 4
        shear_y 3 7 translate_x 9 3
        shear_x 1 6 invert 6 -
        solarize 7 2 translate_y 6 7
        shear_y 8 4 invert 8 -
        shear_x 7 9 translate_y 8 3
        shear_y 8 5 auto_contrast 7 -
        shear_x 7 2 invert 1 -
    """),
}


@dataclass(frozen=True, repr=False)
class SubPolicies(Kind):
    """A list of sub-policies, each two operations ``[name, p, level]``, or the path of a JSON file with one."""

    @property
    @override
    def expected(self) -> str:
        return (
            "a list of sub-policies, each two operations [name, probability, level from 0 to 9], or the path of a .json file"
            " with such a list"
        )

    @override
    def __call__(self, value: Any) -> tuple[SubPolicy, ...]:
        if isinstance(value, Path) or (isinstance(value, str) and value.endswith(".json")):
            try:
                value = json.loads(Path(value).read_text(encoding="utf-8"))
            except OSError as error:
                raise Refused(f"The file cannot be read: {error.strerror}.") from None
        if isinstance(value, str) or not isinstance(value, Sequence) or not value:
            raise ValueError
        return tuple(_sub_policy(one) for one in value)


def _sub_policy(value: Any) -> SubPolicy:
    first, second = (_done(one) for one in value)
    return first, second


def _done(value: Any) -> Done:
    name, p, level = value
    if name not in OPERATIONS:
        raise Refused(f"There is no operation {name!r}. Operations are {', '.join(OPERATIONS)}.")
    return Done(name, Fraction()(p), None if level is None else Number(at_least=0, at_most=LEVELS)(level))
