"""What ``Technique`` does with the names that a class declares: plain training, what checkpoints hold, and a fresh start."""

from typing import Any

import pytest
import torch

from lightning_eff._core.technique import Technique
from tests.cases import CASES


class Counter:
    def __init__(self) -> None:
        self.count = 0


class Base(Technique):
    neutral_at = {"rate": 0.0}
    checkpointed = ("_steps", "_held.count")

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate

    def _reset(self) -> None:
        self._steps: Any = 0
        self._held = Counter()


class Own(Base):
    neutral_at = {"mode": None}
    checkpointed = ("_seen", "losses")

    def __init__(self, rate: float = 1.0, mode: str | None = "fast", start: int = 3) -> None:
        super().__init__(rate)
        self.mode, self.start = mode, start

    def _reset(self) -> None:
        super()._reset()
        self._seen: Any = {"first": self.start}  # the settings of the subclass are there
        self.losses: list[float] = []


class Silent(Own):
    """With no constructor of its own."""


@pytest.mark.parametrize("kind", [Own, Silent])
def test_any_of_the_declared_values_is_plain_training(kind: type[Own]) -> None:
    assert not kind().neutral
    assert kind(rate=0.0).neutral and kind(mode=None).neutral


@pytest.mark.parametrize("kind", [Own, Silent])
def test_a_technique_is_reset_once_it_has_all_its_settings(kind: type[Own]) -> None:
    assert kind(start=7)._seen == {"first": 7} and kind()._steps == 0


def test_a_checkpoint_holds_what_all_classes_declare_under_plain_names() -> None:
    technique = Own()
    technique._steps, technique._held.count = torch.tensor(4), 5
    technique.losses.append(0.5)
    state = technique.state_dict()
    assert state == {"steps": 4, "count": 5, "seen": {"first": 3}, "losses": [0.5]}
    assert type(state["steps"]) is int
    technique.losses.append(0.25)
    technique._seen["second"] = 1
    assert state["losses"] == [0.5] and state["seen"] == {"first": 3}
    other = Own()
    other.load_state_dict(state)
    assert (other._steps, other._held.count, other._seen, other.losses) == (4, 5, {"first": 3}, [0.5])
    other.losses.append(1.0)
    assert state["losses"] == [0.5]


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_declared_name_is_an_attribute(name: str) -> None:
    technique = CASES[name].active()
    for cls in type(technique).__mro__:
        for attribute in vars(cls).get("neutral_at", {}):
            assert hasattr(technique, attribute), f"{cls.__name__}.neutral_at: {attribute}"
    keys = [key for key, owner, attribute in technique._checkpointed() if hasattr(owner, attribute)]
    declared = [path for cls in type(technique).__mro__ for path in vars(cls).get("checkpointed", ())]
    assert len(keys) == len(declared) == len({*keys})
