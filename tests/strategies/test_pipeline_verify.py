"""The checks at setup, which need one process only: what is refused, and which stage uses which parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_eff._core.blocks import find_stack
from lightning_eff.strategies._pipeline import layout as layouts
from lightning_eff.strategies._pipeline._checks.verify import Verification, reached
from lightning_eff.strategies._pipeline.memory import Holdings, free
from lightning_eff.strategies._pipeline.runner import left
from lightning_eff.strategies._pipeline.stack import Stack
from lightning_eff.strategies._pipeline.view import Pass, StageExit
from tests.strategies import pipeline_hazards as hazards
from tests.strategies import pipeline_refused as refusals
from tests.strategies.pipeline_compare import batch as batch_of
from tests.strategies.pipeline_compare import steps, tiny_gpt


def verification(module: Any, schedule: str = "1F1B", batch: Any = None) -> Verification:
    stack = Stack(find_stack(module, None, who="S"), who="S")
    settings: dict[str, Any] = {
        "schedule": schedule,
        "num_ranks": 2,
        "split": "balanced",
        "path": stack.path,
        "who": "S",
    }
    where = layouts.layout(module, stack.blocks, **settings)
    batch = hazards.batch(2) if batch is None else batch
    return Verification(module, stack, where, steps(module), batch, device=torch.device("cpu"), who="S")


def check(module: Any, schedule: str = "1F1B", batch: Any = None) -> Holdings:
    return verification(module, schedule, batch).run()[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Skips", "by a way that leads to 'blocks.0."),
        ("Summed", "by a way that leads to 'blocks.0."),
        ("SideOutputs", "block 1 of 'blocks' is not fed by block 0.*Candidates: none"),
        ("Quiet", "the loss in stage 1"),
        ("Regularised", "by a way that leads to 'blocks.0."),
        ("Noted", "of the first micro-batch would be"),
        ("Twice", "called where block 4 was expected"),
        ("Dropping", "called where block 1 was expected"),
        ("TwoOutputs", r"tensors at \[1\], which"),
        ("Reentrant", "use_reentrant=False"),
        ("Nothing", "training_step returned NoneType"),
        ("Infinite", "a loss of nan"),
        ("Tracked", "the state 'norms'"),
        ("Reported", "in stage 1.*than the hidden state|the logged 'norm' of the first"),
        ("Early", "the step ended before it called block 3"),
    ],
)
def test_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(getattr(refusals, name)())


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"])
def test_reentrant_checkpoints_in_blocks_are_refused_where_the_backward_pass_is_split(schedule: str) -> None:
    with pytest.raises(ValueError, match=rf"schedule='{schedule}'.*reentrant checkpoints do not allow"):
        check(hazards.Inside(), schedule)
    check(hazards.Inside(), "Interleaved1F1B")


def stages(found: Holdings) -> dict[str, tuple[int, ...]]:
    return {name: used for name, used in found.stages.items() if not name.startswith("blocks")}


def test_which_stage_uses_what() -> None:
    gpt: Callable[[bool], Any] = lambda tied: check(tiny_gpt(4, tied=tied), "1F1B", batch_of("tiny_gpt", 2))  # noqa: E731
    untied = {
        "embed.weight": (0,),
        "position.weight": (0,),
        "norm.weight": (1,),
        "norm.bias": (1,),
        "head.weight": (1,),
    }
    assert stages(gpt(False)) == untied
    assert stages(gpt(True))["embed.weight"] == (0, 1) and gpt(True).names["embed.weight"] == (
        "embed.weight",
        "head.weight",
    )
    cond = stages(check(hazards.Conditioned(), "ZBVZeroBubble"))
    assert cond["cond.weight"] == (0, 1, 2, 3) and cond["enter.weight"] == (0,) and cond["leave.bias"] == (3,)
    # a share that is added before block 2 acts on the stage that sends the sum
    assert stages(check(hazards.Mixed()))["share"] == (0, 1)


def test_values_without_a_gradient_count_as_used() -> None:
    found = stages(check(hazards.Detached()))
    assert found["offset"] == (1,) and found["enter.weight"] == (0, 1)  # it is in the loss by its detached mean
    assert found["enter.bias"] == (0,)
    norms = stages(check(hazards.Norms()))
    assert norms["enter.weight"] == (0, 1)  # the last stage's running mean before the blocks is the one that is saved


def test_what_is_let_go_of_holds_no_memory_and_keeps_its_shape() -> None:
    module: Any = hazards.Plain()
    stack = Stack(find_stack(module, None, who="S"), who="S")
    weight, names = (
        module.blocks[0].up.weight,
        [n for n, _ in module.named_parameters() if not n.startswith("blocks.0")],
    )
    free(module, stack, [1, 2, 3], {id(p) for n, p in module.named_parameters() if n in names})
    assert [n for n, _ in module.named_parameters()] == names
    assert weight.shape == (16, 8) and weight.untyped_storage().nbytes() == 4 and bool(weight.isnan().all())
    freed: Any = module.blocks[0]
    assert freed.up.weight.shape == (16, 8) and not freed.up.weight.requires_grad
    with pytest.raises(RuntimeError, match="another pipeline rank owns"):
        freed(torch.zeros(1))


def test_what_is_let_go_of_cannot_be_written() -> None:
    module: Any = hazards.Writes()
    stack = Stack(find_stack(module, None, who="S"), who="S")
    run = Pass(stack, 0, 2, verification(module)._stream())
    assert left(run, steps(module), hazards.batch())[1]
    owned = {id(p) for n, p in module.named_parameters() if not n.startswith(("blocks.2", "blocks.3"))}
    free(module, stack, [0, 1], owned)
    with pytest.raises(ValueError, match=r"S: the step writes to a parameter that another .*_parallel_size=1"):
        left(run, steps(module), hazards.batch())
    with pytest.raises(RuntimeError, match="of my own"):
        left(run, lambda batch: (_ for _ in ()).throw(RuntimeError("of my own")), hazards.batch())


def test_user_code_cannot_stop_the_exit() -> None:
    assert not issubclass(StageExit, Exception)


def test_a_stand_in_looks_like_its_block() -> None:
    module: Any = hazards.Plain()
    stack = Stack(find_stack(module, None, who="S"), who="S")
    blocks: list[Any] = stack.blocks
    run = Pass(stack, 1, 2, verification(module)._stream(), torch.zeros(2, 3, hazards.DIM))
    with run.view():
        shown = module.blocks
        assert all(isinstance(block, hazards.Layer) for block in shown) and len(shown) == 4
        assert shown[0].drop is blocks[0].drop and shown[3].up.weight.shape == (16, 8)
        shown[0].note = 3
        shown.eval()
        assert not shown[2].training
        assert {n.split(".")[1] for n, _ in module.named_parameters() if n.startswith("blocks")} == {"1"}
    assert blocks[0].note == 3 and not blocks[2].drop.training
    assert list(module.blocks) == blocks


def test_reached() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    between = a * 2
    loss = (between * b).sum()
    assert reached(loss) == {id(a), id(b)} and reached(loss, {between.grad_fn}) == {id(b)}
    assert reached(a) == {id(a)} and reached(a.detach()) == set()
