"""More cases of the pipeline tests: all that surrounds a step."""

import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_eff.strategies._pipeline.order import SPLIT_BACKWARD, operations
from tests.runs import largest
from tests.strategies import pipeline_hazards as hazards
from tests.strategies import pipeline_refused as refusals
from tests.strategies import pipeline_zoo as zoo
from tests.strategies.pipeline_cases import CASES, case, cut
from tests.strategies.pipeline_compare import (
    SCHEDULES,
    Logs,
    batch,
    compare,
    hugging_face,
    pipeline,
    reference,
    refused,
    steps,
    tiny_gpt,
    worst_of,
)
from tests.strategies.pipeline_experts import EXPERTS

__all__ = ["CASES"]


def _zoo() -> None:
    def add(name: str, fn: Callable[[], Any]) -> None:
        CASES[f"zoo_{name}"] = fn

    for name, made in zoo.RESIDUALS.items():
        for schedule in SCHEDULES if name == "Residual" else ("Interleaved1F1B", "ZBVZeroBubble"):
            add(f"{name}, {schedule}", lambda m=made, s=schedule: zoo.trained(m, s))
    for name, made in zoo.GIVEN.items():
        for schedule in SPLIT_BACKWARD:
            add(f"{name}, {schedule}", lambda m=made, s=schedule: zoo.trained(m, s))
    for name, made in zoo.LOSSES.items():
        add(name, lambda m=made: zoo.trained(m))
    for name, (made, weight) in zoo.WEIGHED.items():
        add(f"{name}, given", lambda m=made, w=weight: zoo.trained(m, microbatch_weight=w))
    for kind in (zoo.NO_RULE, zoo.SIDEWAYS, zoo.MOVING, {"NormedResidual": (zoo.NormedResidual, zoo.batches)}):
        for name, made in kind.items():
            CASES[f"zoo_refused_{name}"] = lambda m=made: refused(lambda: zoo.set_up(m))


_zoo()
CASES |= EXPERTS


@case
def evaluated_otherwise() -> Any:
    return zoo.evaluated()


@case
def given_weights() -> Any:
    """Also where a micro-batch weighs nothing."""
    return {
        "alike": zoo.in_parts(lambda part: 1.0),
        "labels": zoo.in_parts(lambda part: float(part["mask"].sum())),
        "one is left out": zoo.in_parts(lambda part: float(part["mask"][:, 0].sum() * (part["mask"].sum() > 20))),
    }


@case
def accumulated() -> Any:
    """Gradients over three batches; those of shared parameters are summed over the ranks once."""
    batches = [batch("tiny_gpt", seed=s) for s in range(3)]
    return {s: compare(lambda: tiny_gpt(tied=True), batches, s) for s in ("1F1B", "ZBVZeroBubble")}


def grad_of(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


@case
def scaled() -> Any:
    """A gradient scaler's factor is in the gradients and not in the loss."""
    pipe = cut(hazards.Plain())
    loss = pipe.run(steps(pipe.module), hazards.batch(), scale=torch.tensor(8.0))
    losses, gradients, _ = reference(hazards.Plain(), [hazards.batch()], 4)
    worst = largest(float((grad_of(p) - 8 * gradients[n]).abs().max()) for n, p in pipe.module.named_parameters())
    return worst_of({"loss": abs(float(loss) - losses[0]), "grad": worst})


@case
def never_verified() -> Any:
    """Without a check at setup everything outside the blocks is kept, and the first step learns the shapes."""
    return {
        "Plain": compare(hazards.Plain, [hazards.batch()], "ZBVZeroBubble", verify=False),
        "Shrinking": compare(hazards.Shrinking, [hazards.batch(8, 16)], "Interleaved1F1B", verify=False),
        "Conditioned": compare(hazards.Conditioned, [hazards.batch()], "1F1B", verify=False),
        "tied": compare(lambda: tiny_gpt(tied=True), [batch("tiny_gpt")], "1F1B", verify=False),
    }


@case
def never_verified_skips() -> Any:
    pipe = cut(refusals.Summed(), verify=False)
    return refused(lambda: pipe.run(steps(pipe.module), hazards.batch()))


@case
def frozen() -> Any:
    """The first stage, the last blocks, or all but the head do not train."""

    def make(frozen: Callable[[str], bool]) -> nn.Module:
        module = hazards.Plain()
        for name, p in module.named_parameters():
            p.requires_grad_(not frozen(name))
        return module

    kinds: dict[str, Callable[[str], bool]] = {
        "first": lambda n: n.startswith(("enter", "blocks.0", "blocks.1")),
        "last": lambda n: n.startswith(("blocks.2", "blocks.3", "leave")),
        "blocks": lambda n: n.startswith(("enter", "blocks")),
    }
    return {
        f"{kind}_{schedule}": compare(lambda f=f: make(f), [hazards.batch()], schedule)
        for kind, f in kinds.items()
        for schedule in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    }


@case
def checkpointed_by_hugging_face() -> Any:
    def make(reentrant: bool) -> nn.Module:
        module: Any = hugging_face("llama", dropout=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the old name, which models in use have
            module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return module

    found = {s: compare(lambda: make(False), [batch("llama")], s) for s in ("1F1B", "ZBVZeroBubble", "DualPipeV")}
    return {**found, "reentrant": compare(lambda: make(True), [batch("llama")], "1F1B")}


@case
def reentrant_inside() -> Any:
    return {s: compare(hazards.Inside, [hazards.batch()], s) for s in ("1F1B", "Interleaved1F1B")}


@case
def compiled() -> Any:
    def make() -> nn.Module:
        module = hazards.Plain()
        for block in module.blocks.children():
            block.compile(backend="aot_eager")
        return module

    return {s: compare(make, [hazards.batch()], s) for s in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")}


@case
def autocast() -> Any:
    """bf16-mixed: the precision's context stands inside the step."""

    def wrap(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def inside(part: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return step(part)

        return inside

    return {
        s: compare(lambda m=m: hugging_face(m), [batch(m)], s, wrap=wrap)
        for m, s in (("bert", "1F1B"), ("llama", "ZBVZeroBubble"), ("gpt2", "Interleaved1F1B"))
    }


@case
def order_as_it_runs() -> Any:
    """What each rank runs, in order, read off its runs: stages and micro-batches of forward and backward passes."""
    found = {}
    for schedule in SCHEDULES:
        pipe = cut(hazards.Plain(), schedule)
        ran: list[tuple[int, str, int]] = []
        for runner in pipe.stages:
            forward, again = runner._forward, runner.again

            def noted(r: Any, received: Any, mb: int, ran: Any = ran, run: Any = forward, s: int = runner.stage) -> Any:
                ran.append((s, "F", mb))
                return run(r, received, mb)

            def backward(mb: int, *, last: bool, ran: Any = ran, view: Any = again, s: int = runner.stage) -> Any:
                seen = (s, "I", mb) in ran
                ran.append((s, "W" if seen else "B" if last else "I", mb))
                return view(mb, last=last)

            runner.__dict__.update(_forward=noted, again=backward)
        pipe.run(steps(pipe.module), hazards.batch())
        wanted = operations(schedule, dist.get_world_size(), pipe.layout.num_stages, 4)[dist.get_rank()]
        found[schedule] = ran == wanted and len(ran) >= 8
    return found


@case
def memory_by_blocks() -> Any:
    """Where blocks dominate, a rank's parameters are its share of the whole."""
    module = hazards.Plain(num_layers=64)
    whole = sum(p.numel() for p in module.parameters())
    pipe = cut(module)
    storage = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    freed = [m for b in pipe.stack.blocks for m in b.modules() for v in vars(m).values() if isinstance(v, Tensor)]
    return {
        "share": sum(p.numel() for p in module.parameters()) / whole * dist.get_world_size(),
        "bytes": sum(storage.values()) / (4 * whole) * dist.get_world_size(),
        "freed": len(freed),
        "names": sorted(module.state_dict()) == sorted(n for n in pipe.all_names if n in module.state_dict()),
    }


@case
def what_is_held() -> list[str]:
    module = tiny_gpt()
    pipe = pipeline(module)
    pipe.verify(steps(module), batch("tiny_gpt"))
    pipe.cut()
    return [name for name, _ in module.named_parameters()]


@case
def state_dict_is_shared_out() -> Any:
    """Every key of the whole is saved by one rank, which has it."""
    module = hazards.Norms()
    pipe = cut(module, "ZBVZeroBubble")
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, pipe.owned_names)
    has = set(pipe.owned_names) <= set(module.state_dict())
    return [sorted(n for names in told for n in names) == sorted(pipe.all_names), has]


@case
def logged() -> Any:
    """The same names and values on every rank: means, sums and maxima over micro-batches, and metrics."""
    found = {}
    for schedule in ("1F1B", "ZBVZeroBubble"):
        module: Any = hazards.Logging()
        pipe = cut(module, schedule)
        for metric in pipe.metrics:
            metric.distributed_available_fn = lambda: False  # every rank has all of it
        for seed in range(2):
            pipe.run(steps(module), hazards.batch(seed=seed))
        log = module.__dict__["log"].seen
        values = [(n, float(v.compute()) if hasattr(v, "compute") else round(float(v), 5), o) for n, v, o in log]
        batches = [hazards.batch(seed=s) for s in range(2)]
        losses, _, plain = reference(hazards.Logging(), batches, 4)
        accuracy: Any = plain.accuracy
        accuracy.sync_on_compute = False
        found[schedule] = {
            "values": values[len(values) // 2 :],
            "loss": losses[1],
            "counts": int(module.seen.compute()),
            "accuracy": float(accuracy.compute()),
            "largest": float(batches[1]["x"].max()),
        }
    return found


@case
def evaluated() -> Any:
    """Whole batches: what the step returns is returned on every rank, and so are its logs."""
    module: Any = hazards.Logging()
    plain = hazards.Logging()
    pipe = cut(module, "Interleaved1F1B")
    whole = hazards.batch(5)
    with torch.no_grad():
        output = pipe.evaluate(lambda b: module.validation_step(b, 0), whole)
        again = pipe.evaluate(lambda b: module.validation_step(b, 0), hazards.batch(3, 4))
        expected = plain(whole["x"])
    log = {n: float(v) for n, v, _ in module.__dict__["log"].seen[:1]}
    wanted = float(nn.functional.cross_entropy(expected, whole["y"]))
    return {
        "logits": float((output["logits"] - expected).abs().max()),
        "rest": [output["names"], output["n"], list(again["logits"].shape)],
        "val_loss": abs(log["val_loss"] - wanted),
    }


@case
def untouched_by_verify() -> Any:
    """A check leaves random numbers, buffers, gradients, metrics, logs and modes as they were."""
    module: Any = hazards.Norms()
    module.leave.eval()
    logs = Logs(module)
    state = {n: v.clone() for n, v in module.state_dict().items()}
    before = torch.get_rng_state()
    pipeline(module, "ZBVZeroBubble").verify(steps(module), hazards.batch())
    return [
        bool(torch.equal(before, torch.get_rng_state())),
        all(torch.equal(v, state[n]) for n, v in module.state_dict().items()),
        all(p.grad is None for p in module.parameters()),
        logs.seen == [] and not module.leave.training and module.blocks[0].training,
        type(module.blocks[0]) is hazards.Layer,
    ]


@case
def random_numbers_outside_are_left() -> Any:
    """A pass leaves the global stream where it was, and draws anew in the next pass; a resumed run draws the same."""
    pipe = cut(hazards.Noise())
    before = torch.get_rng_state()
    first = float(pipe.run(steps(pipe.module), hazards.batch()))
    left = bool(torch.equal(before, torch.get_rng_state()))
    state = pipe.state_dict()
    second = float(pipe.run(steps(pipe.module), hazards.batch()))
    other = cut(hazards.Noise(), "ZBVZeroBubble")
    other.load_state_dict(state)
    return [left, first != second, abs(float(other.run(steps(other.module), hazards.batch())) - second)]


@case
def refused_outside_steps() -> Any:
    """A block of another rank that is called beside the steps says so."""
    module: Any = hazards.Plain()
    cut(module)
    try:
        module(torch.zeros(1, 2, hazards.DIM))
    except RuntimeError as error:
        return str(error)


@case
def fails_in_the_middle() -> None:
    """Block 3, on the last rank, fails on the third micro-batch of the second pass."""
    pipe = cut(refusals.Failing())
    pipe.run(steps(pipe.module), hazards.batch())
    last: Any = pipe.stack.blocks[3]
    last.calls = itertools.count(1)
    try:
        pipe.run(steps(pipe.module), hazards.batch())
    except ZeroDivisionError as error:  # a strategy's watch would end the others; here this process's end does
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)
