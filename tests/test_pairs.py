"""Any two techniques train together and resume exactly, or are refused at setup with the reason."""

from itertools import combinations
from pathlib import Path

import pytest
import torch

from lightning_eff import EfficiencyMonitor
from tests.cases import CASES
from tests.models import flat
from tests.runs import NUM_STEPS, checkpoints, differences, final_state, fit

REFUSED = {
    ("ActivationCompression", "ActivationOffload"),
    ("ImportanceSampling", "SelectiveBackprop"),
    ("LatestWeightAveraging", "LocalSGD"),
    ("OptimizerOffload", "ReplaceOptimizer"),
}
PAIRS = list(combinations(sorted(CASES), 2))


@pytest.mark.parametrize(("a", "b"), [pair for pair in PAIRS if pair not in REFUSED])
def test_pair_trains_and_resumes(a: str, b: str, tmp_path: Path) -> None:
    def build() -> list:
        return [CASES[a].active(), CASES[b].active()]

    net, t = fit("tiny_gpt", build, directory=tmp_path)
    whole = final_state(net, t)
    assert t.global_step == NUM_STEPS
    assert flat(net).isfinite().all()
    for path in checkpoints(tmp_path)[2:9:3]:
        assert differences(whole, final_state(*fit("tiny_gpt", build, resume=path))) == [], path.stem
    # the order of the callbacks does not matter: stages order the links; nor does a monitor beside them
    watched = final_state(*fit("tiny_gpt", lambda: build()[::-1], callbacks=[EfficiencyMonitor()]))
    assert differences(whole, watched) == []
    # both act: the pair is neither of the two alone; or what only saves memory leaves what the other does as it is
    for name, other in ((a, b), (b, a)):
        alone, _ = fit("tiny_gpt", lambda name=name: [CASES[name].active()])
        same = torch.equal(flat(alone), flat(net))
        if not CASES[other].exact:
            assert not same, f"the pair trained as {name} alone"
        elif CASES[name].exact or name != "ActivationCompression":
            assert same, f"{other} changed what {name} does"


@pytest.mark.parametrize(("a", "b"), sorted(REFUSED))
def test_pair_is_refused(a: str, b: str) -> None:
    for first, second in ((a, b), (b, a)):
        with pytest.raises(ValueError, match=f"{first} and {second} cannot train together: .+ Take one of them out"):
            fit("tiny_gpt", lambda pair=(first, second): [CASES[name].active() for name in pair])


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_same_technique_twice_is_refused(name: str) -> None:
    """By Lightning itself as the Trainer is made, since the two would share one state; else by us at setup."""
    with pytest.raises(
        (ValueError, RuntimeError), match=f"more than one stateful callback of type `{name}`|{name} and"
    ):
        fit("tiny_gpt", lambda: [CASES[name].active(), CASES[name].active()])


def test_all_in_neutral_settings_are_plain_training() -> None:
    whole = final_state(*fit("tiny_gpt", lambda: [case.neutral() for case in CASES.values()]))
    assert differences(whole, final_state(*fit("tiny_gpt", list))) == []
