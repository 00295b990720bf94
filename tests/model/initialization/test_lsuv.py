"""LSUV: what every map puts out on the first batch has variance 1, on unchanged modules."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff import LSUV
from tests.cases import Case, no_map
from tests.model.initialization.begun import Convolutions, Deep, attentions_of, begun
from tests.model.initialization.test_zero_projections import Encoder, tokens
from tests.models import TinyGPT, hugging_face, make_batch
from tests.runs import fit_yaml

CASES = {
    "LSUV": Case(
        active=lambda: LSUV(),
        neutral=lambda: LSUV(maps=[]),
        lost=(no_map, "classifier", "uses no linear layer or convolution"),
    )
}


def outputs(m: Any, batch: Any) -> dict[str, Tensor]:
    """What each module that is a map puts out."""
    found: dict[str, Tensor] = {}
    for name, module in m.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) or type(module).__name__ == "Conv1D":
            module.register_forward_hook(lambda _, args, y, name=name: found.setdefault(name, y.detach()))
    m.log = lambda *args, **kwargs: None
    m.eval().training_step(batch, 0)
    return found


def deviates(y: Tensor, tolerance: float) -> bool:
    return abs(y.var(correction=0).item() - 1) > tolerance + 1e-4


def test_variances_of_a_deep_network_and_of_convolutions() -> None:
    x = torch.randn(4, 16) * 5
    found = outputs(begun(lambda: Deep(20, 16), x, LSUV(tolerance=0.01)), x)
    assert len(found) == 20 and not any(deviates(y, 0.01) for y in found.values())
    batch = [torch.randn(4, 3, 6, 6) * 0.1 + 2, torch.tensor([0, 1, 2, 0])]
    m = begun(Convolutions, batch, LSUV())
    found = outputs(m, batch)
    assert len(found) == 3 and not any(deviates(y, 0.1) for y in found.values())
    w = m.one.weight.detach().flatten(1)
    square = w @ w.T
    torch.testing.assert_close(square, square[0, 0] * torch.eye(8), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "llama", "vit"])
def test_variances_in_transformers(name: str) -> None:
    build = (lambda: TinyGPT(2, dropout=0.0)) if name == "tiny_gpt" else lambda: hugging_face(name, 2)
    batch = make_batch(name)
    m = begun(build, batch, LSUV(tolerance=0.05))
    found = outputs(m, batch)
    tied = {"model.lm_head"} if name == "gpt2" else set[str]()
    assert len(found) > 6 and {key for key, y in found.items() if deviates(y, 0.05)} <= tied
    for one in attentions_of(m, batch):
        for part in (*one.query, *one.key, *one.value):
            y = found[part.weight.rpartition(".")[0]]
            assert not deviates(y[..., part.outputs], 0.05)


def test_a_map_that_no_module_calls_has_unit_variance_too() -> None:
    """nn.MultiheadAttention hands its weights to a function."""
    seen: list[Tensor] = []
    m = begun(Encoder, tokens(), LSUV())
    attention = m.eval().encoder.layers[0].self_attn
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.append(args[0].detach()), with_kwargs=True)
    m.log = lambda *args: None
    m.training_step(tokens(), 0)
    for part in F.linear(seen[0], attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1):
        assert not deviates(part, 0.1)


def test_what_does_not_vary_stays_orthonormal_and_is_said() -> None:
    ours = LSUV()
    m = begun(lambda: Deep(3, 8), torch.zeros(4, 8), ours)
    assert "3 layers are only orthonormal" in ours.summary()
    w = m.maps[0].weight.detach()
    torch.testing.assert_close(w @ w.T, torch.eye(8), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tolerance": 0.0}, "tolerance=0.0.: expected a finite number > 0"),
        ({"tolerance": math.nan}, "tolerance=nan.: expected a finite number > 0"),
        ({"iterations": 0}, "iterations=0.: expected an integer >= 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LSUV(**settings)


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "LSUV", {"tolerance": 0.2}, model="TinyGPT", data="Sequences", max_steps=1)
    assert "in layers with outputs of variance 1" in capsys.readouterr().out
