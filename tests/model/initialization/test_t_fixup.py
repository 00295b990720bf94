"""TFixup: ratios of deviations by depth, exactly; queries and keys are not scaled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff import TFixup
from tests.cases import Case, classifier
from tests.model.initialization.begun import attentions_of, begun
from tests.model.initialization.test_zero_projections import Encoder, tokens
from tests.models import TinyGPT, hugging_face, make_batch
from tests.runs import fit_yaml

CASES = {
    "TFixup": Case(
        active=lambda: TFixup(),
        neutral=lambda: TFixup(maps=[]),
        lost=(classifier, "classifier", "needs some of both"),
    )
}

# By name: the module, its batch, and the layers of its encoder and decoder.
NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[], Any], int, int]] = {
    "hand-written": (lambda: TinyGPT(3, dropout=0.0), tokens, 3, 0),
    "gpt2": (lambda: hugging_face("gpt2", 2), lambda: make_batch("gpt2"), 2, 0),
    "llama": (lambda: hugging_face("llama", 2), lambda: make_batch("llama"), 2, 0),
    "vit": (lambda: hugging_face("vit", 2), lambda: make_batch("vit"), 2, 0),
    "post-norm": (Encoder, tokens, 3, 0),
    "t5": (lambda: hugging_face("t5", 2), lambda: make_batch("t5"), 2, 2),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_ratios_are_exact_and_queries_and_keys_stay(name: str) -> None:
    build, batch, encoder, decoder = NETWORKS[name]
    torch.manual_seed(0)
    plain = dict(build().named_parameters())
    m = begun(build, batch(), TFixup(draw=False))
    parameters = dict(m.named_parameters())
    expected = {False: 0.67 * encoder**-0.25, True: (9 * max(decoder, 1)) ** -0.25}
    seen = 0
    for one in attentions_of(m, batch()):
        scale = expected["decoder" in one.output[0]]
        for part in (*one.query, *one.key):
            assert torch.equal(part.of(parameters[part.weight]), part.of(plain[part.weight]))
        for part in one.value:
            new, old = part.of(parameters[part.weight]), part.of(plain[part.weight])
            torch.testing.assert_close(new, scale * old)
            seen += 1
        torch.testing.assert_close(parameters[one.output[0]], scale * plain[one.output[0]])
    assert seen == encoder + 2 * decoder
    for key in parameters:
        if (
            any(part in key for part in ("mlp.0.", "mlp.c_fc", "up_proj", "fc1", "linear1.", "DenseReluDense.wi"))
            and "weight" in key
        ):
            torch.testing.assert_close(parameters[key], expected["decoder" in key] * plain[key])
            seen += 1
        if any(part in key for part in ("wte", "embed.weight", "embed_tokens", "shared")):
            torch.testing.assert_close(parameters[key], (9 * (decoder or encoder)) ** -0.25 * plain[key])
    assert seen == 2 * encoder + 3 * decoder


def test_what_is_drawn_is_xaviers(capsys: pytest.CaptureFixture[str]) -> None:
    m = begun(lambda: TinyGPT(2, dim=64, dropout=0.0), tokens(), TFixup())
    block = m.blocks[0]
    xavier, scale = (2 / (64 + 64)) ** 0.5, 0.67 * 2**-0.25
    q, k, v = block.qkv.weight.detach().chunk(3)
    assert q.std().item() == pytest.approx(xavier, rel=0.05) and k.std().item() == pytest.approx(xavier, rel=0.05)
    assert v.std().item() == pytest.approx(scale * xavier, rel=0.05)
    assert block.mlp[0].weight.std().item() == pytest.approx(scale * (2 / (64 + 256)) ** 0.5, rel=0.05)
    assert v.abs().max() <= scale * (6 / 128) ** 0.5 and not block.qkv.bias.any() and not block.proj.bias.any()
    assert m.embed.weight.std().item() == pytest.approx(18**-0.25 / 8, rel=0.05)


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "TFixup", {}, model="TinyGPT", data="Sequences", max_steps=1)
    assert "numbers by depth" in capsys.readouterr().out
