"""ACTPrecision is no callback, and so no case of ``tests.cases``: what of the contract holds for a plugin is tried here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff import ACTPrecision
from lightning_eff._core.technique import Technique
from tests.cases import CASES
from tests.ddp import launch
from tests.models import flat, loader, module, trainer
from tests.runs import MODES, NUM_STEPS, checkpoints, differences, final_state, fit, resume_from_every_step

REFUSED = ("ActivationCompression", "ActivationOffload")


def plugin(bits: Any = 2, **mode: Any) -> ACTPrecision:
    """The plugin that stands for a Trainer's ``precision``."""
    return ACTPrecision(bits=bits, inner=mode.pop("precision", "32-true"))


def without_precision(mode: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mode.items() if key != "precision"}


def resuming() -> list[Technique]:
    """What makes a run resume its data and its random numbers exactly, and changes no weight."""
    return [CASES["LatestWeightAveraging"].neutral()]


@pytest.mark.parametrize("inner", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("model", ["gpt2", "llama", "bert", "vit"])
def test_trains_hugging_face_models(model: str, inner: Any) -> None:
    act = ACTPrecision(bits=2, inner=inner)
    net, t = fit(model, list, plugins=[act])
    plain, _ = fit(model, list, precision=inner)
    assert t.global_step == NUM_STEPS
    assert flat(net).isfinite().all()
    assert not torch.equal(flat(net), flat(plain)), "nothing was compressed"
    assert [p.dtype for p in net.parameters()] == [p.dtype for p in plain.parameters()]


@pytest.mark.parametrize("mode", sorted(MODES))
def test_resume_equals_uninterrupted_from_every_step(mode: str, tmp_path: Path) -> None:
    settings = without_precision(MODES[mode])
    acts = [plugin(**MODES[mode])]
    assert resume_from_every_step("tiny_gpt", resuming, tmp_path, plugins=acts, **settings) == {}


def test_checkpoints_are_the_plain_modules(tmp_path: Path) -> None:
    fit("tiny_gpt", list, directory=tmp_path, plugins=[plugin()])
    saved = checkpoints(tmp_path)
    assert len(saved) == NUM_STEPS
    for path in saved:
        module("tiny_gpt").load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
    net, t = fit("tiny_gpt", list, resume=saved[4])  # a plain trainer goes on from it
    assert t.global_step == NUM_STEPS and flat(net).isfinite().all()


def test_under_ddp() -> None:
    """Each rank rounds by numbers of its own, ranks end alike, and a resumed run ends as the undisturbed one."""
    found = launch("act_precision", "tiny_gpt")["tiny_gpt"]
    assert found == {"alike": True, "finite": True, "differences": [[], []], "compressed": True, "apart": True}


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_no_trace(fails: bool) -> None:
    act, net = plugin(), module("tiny_gpt")
    trainer(max_steps=1).fit(net, loader("tiny_gpt"))  # Lightning leaves attributes of its own
    before = {path: sorted(m.__dict__) for path, m in net.named_modules()}
    step, calls = net.training_step, []

    def failing(batch: Any, batch_idx: int) -> Any:
        calls.append(batch_idx)
        if fails and len(calls) > 2:
            raise RuntimeError("planted")
        return step(batch, batch_idx)

    net.training_step = failing
    if fails:
        with pytest.raises(RuntimeError, match="planted"):
            trainer(max_steps=4, plugins=[act]).fit(net, loader("tiny_gpt"))
    else:
        trainer(max_steps=4, plugins=[act]).fit(net, loader("tiny_gpt"))
    del net.training_step
    assert {path: sorted(m.__dict__) for path, m in net.named_modules()} == before
    assert act._module is None and act._engine is None
    saved: list[torch.Tensor] = []
    weight = nn.Parameter(torch.ones(64, 64))
    y = torch.tanh(weight @ weight)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        (y * y).sum().backward()
    assert saved and all(t.data_ptr() == y.data_ptr() for t in saved), "hooks or modes were left behind"


@pytest.mark.parametrize("name", sorted(CASES))
def test_with_each_technique(name: str, tmp_path: Path) -> None:
    def run(**kwargs: Any) -> Any:
        return fit("tiny_gpt", lambda: [CASES[name].active()], plugins=[plugin()], **kwargs)

    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"{name}: the precision plugin ACTPrecision .*Take one of them out"):
            run()
        return
    net, t = run(directory=tmp_path)
    whole = final_state(net, t)
    assert t.global_step == NUM_STEPS and flat(net).isfinite().all()
    for path in checkpoints(tmp_path)[3:9:5]:
        assert differences(whole, final_state(*run(resume=path))) == [], path.stem
    alone, _ = fit("tiny_gpt", lambda: [CASES[name].active()])
    assert not torch.equal(flat(alone), flat(net)), "nothing was compressed"
