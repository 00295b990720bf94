"""What the checks of a pipeline say reaches whole runs of the Trainer, on every rank."""

from tests.strategies import pipeline_zoo as zoo
from tests.strategies.launch import launch


def test_runs_of_modules_that_a_pipeline_would_train_wrongly_end_before_the_first_step() -> None:
    found = launch("tests.strategies.hybrid_jobs", "observe_pipelines", world_size=2)
    for name, words in (
        *((name, "microbatch_weight=f") for name in zoo.NO_RULE),
        *((name, "than the hidden state") for name in zoo.SIDEWAYS),
        *((name, "training_step changes") for name in zoo.MOVING),
    ):
        for said in found[name]:
            assert said.startswith("HybridParallelStrategy") and words in said, f"{name}: {said}"
    assert found["class weights, given"] == found["Residual"] == ["", ""]
