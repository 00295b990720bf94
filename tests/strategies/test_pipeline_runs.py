"""What the checks of a pipeline say reaches whole runs of the Trainer, on every rank."""

from tests.strategies import pipeline_zoo as zoo
from tests.strategies.launch import launch


def test_runs_of_modules_that_a_pipeline_would_train_wrongly_end_before_the_first_step() -> None:
    found = launch("tests.strategies.hybrid_jobs", "observe_pipelines", world_size=2)
    for names, words in (
        (zoo.NO_RULE, ("microbatch_weight=f",)),
        (zoo.SIDEWAYS, ("than the hidden state", "leave tensors with gradients in")),
        (zoo.MOVING, ("training_step changes",)),
    ):
        for name in names:
            for said in found[name]:
                assert said.startswith("HybridParallelStrategy"), f"{name}: {said}"
                assert any(word in said for word in words), f"{name}: {said}"
    assert found["class weights, given"] == found["Residual"] == ["", ""]
