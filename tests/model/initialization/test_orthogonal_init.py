"""OrthogonalInit: orthonormal maps, whatever they are made of, and a deep linear network that keeps lengths."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_eff import OrthogonalInit
from lightning_eff.model.initialization._maps import orthogonal
from tests.cases import Case, no_map
from tests.model.initialization.begun import Convolutions, Deep, attentions_of, begun
from tests.models import TinyGPT, hugging_face, make_batch
from tests.runs import fit_yaml

CASES = {
    "OrthogonalInit": Case(
        active=lambda: OrthogonalInit(),
        neutral=lambda: OrthogonalInit(maps=[]),
        lost=(no_map, "classifier", "uses no linear layer or convolution"),
    )
}


def orthonormal(matrix: Tensor, gain: float) -> None:
    matrix = matrix.detach().flatten(1)
    square = matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix
    torch.testing.assert_close(square, gain**2 * torch.eye(len(square)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (3, 7), (4, 2, 3, 3), (1, 6)])
def test_rows_or_columns_are_orthonormal(shape: tuple[int, ...]) -> None:
    w = orthogonal(shape, gain=1.5, generator=torch.Generator().manual_seed(0))
    orthonormal(w, 1.5)
    reference = torch.nn.init.orthogonal_(torch.empty(shape))  # as far as the law goes: entries of these mean squares
    assert w.square().sum().item() == pytest.approx(1.5**2 * reference.square().sum().item(), rel=1e-4)


def test_a_hundred_linear_maps_keep_the_length() -> None:
    x = torch.randn(4, 16)
    m = begun(lambda: Deep(100, 16), x, OrthogonalInit())
    torch.testing.assert_close(m.maps(x).norm(dim=1), x.norm(dim=1), rtol=1e-4, atol=0)
    plain = Deep(100, 16)
    assert (plain.maps(x).norm(dim=1) < 1e-6).all()


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "llama", "vit"])
def test_queries_keys_and_values_are_each_orthonormal(name: str) -> None:
    build = (lambda: TinyGPT(2, dropout=0.0)) if name == "tiny_gpt" else lambda: hugging_face(name, 2)
    m = begun(build, make_batch(name), OrthogonalInit(gain=2.0))
    every, parameters = attentions_of(m, make_batch(name)), dict(m.named_parameters())
    assert len(every) == 2
    for one in every:
        for part in (*one.query, *one.key, *one.value):
            orthonormal(part.of(parameters[part.weight]), 2.0)
        orthonormal(parameters[one.output[0]], 2.0)


def test_what_is_tied_or_no_map_stays() -> None:
    torch.manual_seed(0)
    plain = hugging_face("gpt2", 1).state_dict()
    m = begun(lambda: hugging_face("gpt2", 1), make_batch("gpt2"), OrthogonalInit())
    changed = {key for key, value in m.state_dict().items() if not torch.equal(value, plain[key])}
    assert {key.split(".")[-2] for key in changed} == {"c_attn", "c_proj", "c_fc"} and len(changed) == 4


def test_convolutions_by_group_and_ones_that_are_named() -> None:
    batch = [torch.randn(2, 3, 6, 6), torch.tensor([0, 1])]
    m = begun(Convolutions, batch, OrthogonalInit(maps=["one.*", "two.*"]))
    orthonormal(m.one.weight, 1.0)
    for group in m.two.weight.chunk(2):
        orthonormal(group, 1.0)
    torch.manual_seed(0)
    assert torch.equal(m.head.weight, Convolutions().head.weight)


def test_names_that_fit_nothing_are_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"\['nose'\] matches no weight.*one.weight, two.weight, head.weight"):
        begun(Convolutions, [torch.randn(2, 3, 6, 6), torch.tensor([0, 1])], OrthogonalInit(maps=["one.*", "nose"]))
    with pytest.raises(ValueError, match="expected a list of names or patterns of weights"):
        OrthogonalInit(maps="one")


@pytest.mark.parametrize("gain", [0.0, -1.0, math.nan, math.inf])
def test_bad_gains_are_refused(gain: float) -> None:
    with pytest.raises(ValueError, match=rf"gain={gain}\): expected a finite number > 0"):
        OrthogonalInit(gain=gain)


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "OrthogonalInit", {"gain": 1.4}, model="TinyGPT", data="Sequences", max_steps=1)
    assert "in orthonormal matrices of gain 1.4" in capsys.readouterr().out
