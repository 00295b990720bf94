"""Techniques under strategies that divide a run: what is accepted trains as in one process, what is refused says why."""

from typing import Any

import pytest
from lightning.pytorch.strategies import ModelParallelStrategy

import lightning_eff
from lightning_eff._core._needs.needs import Part, refused
from lightning_eff._core._needs.offers import parts_of, refusal
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique, techniques_of
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
from tests.cases import CASES
from tests.conftest import Once
from tests.models import module, trainer
from tests.selection import share_of
from tests.strategies.launch import launch

LAYOUTS = {
    "copies": (Part.COPIES,),
    "shard": (Part.SHARD,),
    "fsdp2": (Part.SHARD, Part.ITSELF),
    "tensor": (Part.TENSOR,),
    "pipeline": (Part.PIPELINE,),
}
SPLIT = ("tensor", "pipeline")
#: Techniques whose runs differ by what they are for, and not by rounding alone, and why: their losses are near.
OTHERWISE = {
    (
        "ActivationCompression",
        layout,
    ): "it rounds at random what each process keeps, of which another one keeps other parts"
    for layout in ("tensor", "pipeline")
}


def _accepts(name: str, layout: str) -> bool:
    cls = getattr(lightning_eff, name)
    return not refused(cls.needs, cls.refuses, LAYOUTS[layout])


PAIRS = [(name, layout) for name in sorted(CASES) for layout in LAYOUTS]
ACCEPTED = [pair for pair in PAIRS if _accepts(*pair) and pair not in OTHERWISE]
REFUSED = [pair for pair in PAIRS if not _accepts(*pair)]


def _default() -> list[tuple[str, str]]:
    """Of a third of the techniques, one of the layouts that each is accepted in; the others are slow."""
    found = []
    for name in sorted({name for name, _ in ACCEPTED}):
        layouts = [layout for other, layout in ACCEPTED if other == name]
        if share_of(3, name) == 0:
            found.append((name, layouts[share_of(len(layouts), name, "layout")]))
    return found


DEFAULT = _default()


def _found(name: str, layout: str, once: Once) -> Any:
    """What two processes found, which run all that are alike in being slow, and in how the module is divided."""
    slow, split = (name, layout) not in DEFAULT, layout in SPLIT
    alike = [pair for pair in ACCEPTED if (pair not in DEFAULT, pair[1] in SPLIT) == (slow, split)]
    every = once(f"techniques{'_split' * split}{'_slow' * slow}", lambda: _run(alike))
    return every[f"{name} {layout}"]


def _run(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    return launch("tests.strategies.technique_jobs", "all_of", pairs, world_size=2)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*pair, marks=() if pair in DEFAULT else pytest.mark.slow, id="-".join(pair)) for pair in ACCEPTED],
)
def test_an_accepted_technique_trains_as_in_whole_modules(name: str, layout: str, once: Once) -> None:
    for rank, found in enumerate(_found(name, layout, once)):
        assert "error" not in found, found["error"]
        if rank and (name, layout) == ("SeqNorm", "fsdp2"):  # FSDP2 leaves each rank its own running statistics
            continue
        assert found["loss"] < 2e-4 and found["weights"] < 1e-3 and not found["keys"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "layout"), [pytest.param(*pair, id="-".join(pair)) for pair in OTHERWISE])
def test_a_technique_that_draws_for_pieces_trains_nearly_as_in_whole_modules(
    name: str, layout: str, once: Once
) -> None:
    for found in once("techniques_otherwise", lambda: _run([*OTHERWISE]))[f"{name} {layout}"]:
        assert "error" not in found, found["error"]
        assert 1e-6 < found["loss"] < 5e-3 and not found["keys"]


def strategy(layout: str) -> ModelParallelStrategy:
    """That of two processes, of which this one need not know."""
    if layout == "fsdp2":
        return ModelParallelStrategy(2, 1)
    size = {"tensor": "tensor_parallel_size", "pipeline": "pipeline_parallel_size"}.get(layout, "data_parallel_size")
    made = HybridParallelStrategy(**{"data_parallel_size": 1, "shard": layout == "shard", size: 2})
    assert parts_of(made) == LAYOUTS[layout]
    return made


@pytest.mark.parametrize(("name", "layout"), [pytest.param(*pair, id="-".join(pair)) for pair in REFUSED])
def test_a_refused_technique_says_why_at_setup(name: str, layout: str) -> None:
    technique: Technique = CASES[name].active()
    t = trainer(technique, max_steps=2)
    t._accelerator_connector.strategy = strategy(layout)
    with pytest.raises(ValueError) as error:
        Session.open(t, module(CASES[name].model), techniques_of(t), "fit")
    assert str(error.value) == refusal(name, technique.needs, technique.refuses, strategy(layout))
    assert str(error.value).startswith(f"{name}: {type(strategy(layout)).__name__} ")
    assert "Use " in str(error.value) and f", or remove {name}." in str(error.value)
