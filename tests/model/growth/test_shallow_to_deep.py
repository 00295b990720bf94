"""Shallow-to-deep training: new groups are copies of the last one, and each stage has a rate of its own."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from transformers import ModernBertConfig, ModernBertForMaskedLM

from lightning_eff import LearningRateSchedule, ShallowToDeep
from lightning_eff.model.growth.shallow_to_deep import group_stages, rate_within
from tests.cases import Case, no_blocks
from tests.model.growth.residual import PostNorm
from tests.models import LENGTH, VOCAB, HuggingFace, TinyGPT, loader, trainer
from tests.runs import fit_yaml

CASES = {
    "ShallowToDeep": Case(
        active=lambda: ShallowToDeep(group=2, until=0.4),
        neutral=lambda: ShallowToDeep(until=0.0, rate=None),
        on_classifier=lambda: ShallowToDeep(group=1, until=0.4, rate="cosine"),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
        as_is=lambda: ShallowToDeep(group=1),
    )
}


def modern_bert() -> Any:
    config = ModernBertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        attention_dropout=0.0,
    )
    config._attn_implementation = "eager"
    return HuggingFace(ModernBertForMaskedLM(config).train())


def blocks_of(net: nn.Module) -> list[Any]:
    return next(list(m) for m in net.modules() if isinstance(m, nn.ModuleList) and len(m) > 3)


def test_the_rules() -> None:
    assert group_stages(12, group=3, until=0.6) == [
        (0.0, 3),
        (pytest.approx(0.2), 6),
        (pytest.approx(0.4), 9),
        (0.6, 12),
    ]
    assert group_stages(4, group=4, until=0.6) == [(0.0, 4)]
    for shape in ("inverse_sqrt", "linear", "cosine"):
        assert [rate_within(v, shape=shape, warmup=0.2) for v in (0.0, 0.1, 0.2)] == [0.0, 0.5, 1.0]
    # the Transformer's: proportional to min(step, warmup^1.5 / step^0.5), at its highest at the warm-up's end
    steps, n, w = range(1, 101), 100, 20
    noam = [min(s**-0.5, s * w**-1.5) / w**-0.5 for s in steps]
    assert [rate_within(s / n, shape="inverse_sqrt", warmup=w / n) for s in steps] == pytest.approx(noam)
    assert rate_within(0.6, shape="linear", warmup=0.2) == pytest.approx(0.5)
    assert rate_within(0.4, shape="cosine", warmup=0.2) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize("name", ["tiny_gpt", "post_norm", "modern_bert"])
@pytest.mark.parametrize("copy", [True, False])
def test_a_new_group_is_a_copy_of_the_last_and_the_rate_begins_anew(name: str, copy: bool) -> None:
    """T, bit for bit, with moments where asked; ModernBERT's first block has no norm to copy, and its copy keeps its own."""
    pl.seed_everything(1, verbose=False)
    net = {"tiny_gpt": lambda: TinyGPT(num_layers=6), "post_norm": lambda: PostNorm(6), "modern_bert": modern_bert}[
        name
    ]()
    blocks, switched, rates = blocks_of(net), [], []
    first = dict(blocks[2].named_parameters())
    fresh = {n: p.detach().clone() for n, p in first.items() if n not in dict(blocks[0].named_parameters())}

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])
            active = int(technique.report()["layers_active"])
            if active == (switched or [2])[-1]:
                return
            switched.append(active)
            state = trainer.optimizers[0].state
            for j in (active - 2, active - 1):
                old, new = dict(blocks[j - 2].named_parameters()), dict(blocks[j].named_parameters())
                assert all(torch.equal(new[n], p) and new[n] is not p for n, p in old.items())
                assert (j == 2 and name == "modern_bert") == (old.keys() < new.keys())
                if j == 2:
                    assert all(torch.equal(new[n], value) for n, value in fresh.items())
                for n, p in old.items():
                    assert (new[n] in state) == copy
                    if copy:
                        assert torch.equal(state[new[n]]["exp_avg"], state[p]["exp_avg"])

    technique = ShallowToDeep(group=2, until=0.6, copy_optimizer_state=copy, warmup=0.25)
    data = "bert" if name == "modern_bert" else "tiny_gpt"
    trainer(technique, Looks(), max_steps=20).fit(net, loader(data))
    assert switched == [4, 6]
    highest = {"tiny_gpt": 1e-2}.get(name, 1e-3)
    starts = [0] * 6 + [6] * 6 + [12] * 8
    lengths = [6] * 12 + [8] * 8
    expected = [
        highest * rate_within((s - a) / n, shape="inverse_sqrt", warmup=0.25)
        for s, a, n in zip(range(20), starts, lengths, strict=True)
    ]
    assert rates == pytest.approx(expected, abs=1e-12) and rates[12] == 0.0 == rates[6]
    assert technique.summary().startswith("2 -> 4 (step 6) -> 6 (step 12) of 6 blocks of '")


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group=0\): expected an integer >= 1: the number of blocks"):
        ShallowToDeep(group=0)
    with pytest.raises(ValueError, match=r"until=1.0\): expected a number in \[0, 1\): the fraction of the budget"):
        ShallowToDeep(until=1.0)
    with pytest.raises(ValueError, match=r"rate='rex'\): expected 'inverse_sqrt', 'linear' or 'cosine', or None"):
        ShallowToDeep(rate="rex")
    with pytest.raises(ValueError, match=r"warmup=0.0\): expected a number in \(0, 1\): the fraction of a stage"):
        ShallowToDeep(warmup=0.0)
    for group in (3, 6):
        with pytest.raises(
            ValueError,
            match=rf"group={group}\): 'blocks' .* has 4 blocks, which is not a multiple .* Use one of 1, 2, 4",
        ):
            trainer(ShallowToDeep(group=group), max_steps=2).fit(TinyGPT(), loader("tiny_gpt"))
    net = TinyGPT()
    assert net.blocks is not None
    net.blocks[2].norm1 = nn.Identity()
    with pytest.raises(
        ValueError,
        match=r"block 2 of .* cannot copy block 0, because their parameters or buffers differ at \['norm1.bias', 'norm1.w",
    ):
        trainer(ShallowToDeep(group=2), max_steps=2).fit(net, loader("tiny_gpt"))


def test_runs_by_a_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "ShallowToDeep", {"group": 1, "until": 0.5, "rate": "cosine"}, max_steps=4)


class Rates(pl.Callback):
    """The rate of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_where_rates_are_left_to_the_module_others_may_lead_them() -> None:
    """Rates led by LearningRateSchedule are those that it leads alone, and its own are refused beside it."""
    found = []
    for first in ([], [ShallowToDeep(group=1, until=0.3, rate=None)]):
        rates = Rates()
        trainer(*first, LearningRateSchedule("rex"), rates, max_steps=10).fit(TinyGPT(), loader("tiny_gpt"))
        found.append(rates.seen)
    assert found[0] == pytest.approx(found[1]) and found[0][0] > 3 * found[0][-1] > 0
    with pytest.raises(ValueError, match="both set the learning rate"):
        trainer(ShallowToDeep(group=1), LearningRateSchedule("rex"), max_steps=10).fit(TinyGPT(), loader("tiny_gpt"))
