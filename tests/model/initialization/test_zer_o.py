"""ZerO: no number is drawn, branches add nothing, and maps are partial identities or Hadamard matrices."""

from pathlib import Path

import pytest
import torch

from lightning_eff import ZerO
from lightning_eff.model.initialization.zer_o import hadamard, zero_and_one
from tests.cases import Case, no_map
from tests.model.initialization.begun import Convolutions, attentions_of, begun
from tests.models import TinyGPT, hugging_face, make_batch
from tests.runs import fit_yaml

CASES = {
    "ZerO": Case(
        active=lambda: ZerO(),
        neutral=lambda: ZerO(maps=[]),
        lost=(no_map, "classifier", "uses no linear layer or convolution"),
    )
}


def test_hadamard_matrices_against_scipy() -> None:
    reference = pytest.importorskip("scipy.linalg").hadamard
    for p in (1, 2, 8, 16):
        assert torch.equal(hadamard(p).int(), torch.from_numpy(reference(p)).int())


@pytest.mark.parametrize(("m", "n"), [(8, 3), (16, 5), (4, 4), (12, 5), (3, 7), (1, 4), (2, 1)])
def test_columns_are_orthonormal_where_outputs_are_a_power_of_two(m: int, n: int) -> None:
    w = zero_and_one(m, n)
    assert w.shape == (m, n)
    if m <= n:
        assert torch.equal(w, torch.eye(m, n))
    else:
        orthonormal = torch.allclose(w.T @ w, torch.eye(n), atol=1e-6)
        assert orthonormal == (m & (m - 1) == 0)
        p = 1 << (m - 1).bit_length()
        torch.testing.assert_close(w.abs(), torch.full((m, n), p**-0.5))


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "llama", "vit"])
def test_no_seed_decides_a_map_and_branches_add_nothing(name: str) -> None:
    build = (lambda: TinyGPT(2, dropout=0.0)) if name == "tiny_gpt" else lambda: hugging_face(name, 2)
    one, other = (begun(build, make_batch(name), ZerO(), seed=seed) for seed in (0, 1))
    same = {key for key, value in one.state_dict().items() if torch.equal(value, other.state_dict()[key])}
    maps = {
        key for key in one.state_dict() if key.endswith(("weight",)) and ("proj" in key or "mlp" in key or "qkv" in key)
    }
    assert maps <= same and maps
    parameters = dict(one.named_parameters())
    for attention in attentions_of(one, make_batch(name)):
        assert not parameters[attention.output[0]].any()
        (part,) = attention.value
        value = part.of(parameters[part.weight])
        value = value.mT if part.dim else value
        torch.testing.assert_close(value.detach(), torch.eye(*value.shape), rtol=0, atol=0)


def test_convolutions_hand_on_the_middle() -> None:
    m = begun(Convolutions, [torch.randn(2, 3, 6, 6), torch.tensor([0, 1])], ZerO(last=False))
    assert m.one.weight[:, :, 0].abs().sum() == 0 and not m.one.bias.any()
    torch.testing.assert_close(m.one.weight[:, :, 1, 1].detach(), zero_and_one(8, 3), rtol=0, atol=0)
    for group in m.two.weight.detach().chunk(2):
        torch.testing.assert_close(group[:, :, 1, 1], zero_and_one(6, 4), rtol=0, atol=0)


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "ZerO", {}, model="TinyGPT", data="Sequences", max_steps=1)
    assert "numbers without drawing any" in capsys.readouterr().out
