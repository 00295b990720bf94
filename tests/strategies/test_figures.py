"""Further settings of techniques in divided runs: losses, weights and figures are those of one process, on every rank."""

from typing import Any

import pytest

import lightning_eff as eff
from lightning_eff._core._needs.needs import Part, refused
from tests.conftest import Once
from tests.strategies.figure_jobs import SETTINGS
from tests.strategies.launch import launch

PAIRS = [(name, layout) for name, setting in SETTINGS.items() for layout in setting.layouts]


def _run() -> dict[str, Any]:
    return launch("tests.strategies.figure_jobs", "compared", list(SETTINGS), world_size=2)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "layout"), [pytest.param(*pair, id="-".join(pair)) for pair in PAIRS])
def test_a_setting_trains_and_reports_as_in_one_process(name: str, layout: str, once: Once) -> None:
    for found in once("figures", _run)[f"{name} {layout}"]:
        assert found["losses"] < 2e-5 and found["weights"] < 2e-5
        for one, several in found["figures"].values():
            assert several == pytest.approx(one, rel=1e-3, abs=1e-6)


def test_gradients_in_the_batch_are_refused_where_no_process_has_the_module() -> None:
    technique = eff.SaliencyMix(saliency="gradient")
    assert refused(technique.needs, technique.refuses, Part).keys() >= {Part.SHARD, Part.PIPELINE}
    assert Part.PIPELINE not in refused(eff.SaliencyMix.needs, eff.SaliencyMix.refuses, Part)
