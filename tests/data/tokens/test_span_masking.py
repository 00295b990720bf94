"""SpanMasking: what the encoder does not see is what the decoder predicts, and the decoder reads nothing else."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import SpanMasking
from lightning_eff.data.tokens.span_masking import decoder_input, hide, spans
from tests.cases import Case, classifier
from tests.families import module as of_family
from tests.models import VOCAB, module, trainer
from tests.runs import fit_yaml

CASES = {
    "SpanMasking": Case(
        active=lambda: SpanMasking(mask_token_id=3),
        neutral=lambda: SpanMasking(ratio=0.0),
        model="translator",
        refuses=dict.fromkeys(("tiny_gpt", "gpt2", "llama", "bert", "vit"), "holds no encoder-decoder"),
        lost=(classifier, "classifier", "holds no encoder-decoder"),
    )
}
MASK, IGNORE, PAD = 60, -100, 0


def texts(size: int = 64, length: int = 24, seed: int = 0) -> dict[str, Tensor]:
    """Tokens from 3 up, of several lengths, which 1 ends; 0 pads."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB - 1, (size, length), generator=g)
    lengths = torch.randint(4, length + 1, (size, 1), generator=g)
    attention = (torch.arange(length) < lengths).long()
    ids = torch.where(torch.arange(length) == lengths - 1, 1, ids).masked_fill(attention == 0, PAD)
    return {"input_ids": ids, "attention_mask": attention, "labels": ids.masked_fill(attention == 0, IGNORE)}


class Spy(pl.LightningModule):
    """Keeps its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.batches = nn.Linear(1, 1), nn.Linear(1, 1), list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return self.encoder.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(technique: SpanMasking, *batches: Any) -> list[Any]:
    net = Spy()
    trainer(technique, max_steps=len(batches)).fit(net, DataLoader(batches, batch_size=None))  # pyright: ignore[reportArgumentType]
    return net.batches


def masking(**kwargs: Any) -> SpanMasking:
    return SpanMasking(**{"mask_token_id": MASK, "special_tokens": [PAD, 1], **kwargs})


@pytest.mark.parametrize("ratio", [0.5, 0.3, 1.0])
def test_what_the_encoder_does_not_see_is_what_the_decoder_predicts(ratio: float) -> None:
    """One span in each text, of its share to a token, at every place where it fits; specials and padding stay."""
    batches = [{**texts(seed=seed), "decoder_input_ids": texts(seed=seed)["input_ids"]} for seed in range(6)]
    technique = masking(ratio=ratio)
    begins: set[int] = set()
    for batch, plain in zip(seen(technique, *batches), batches, strict=True):
        hidden, targets = batch["input_ids"] == MASK, batch["labels"] != IGNORE
        assert torch.equal(hidden, targets)
        assert torch.equal(batch["labels"][targets], plain["input_ids"][targets])
        assert torch.equal(batch["input_ids"][~hidden], plain["input_ids"][~hidden])
        for row, text in zip(targets, plain["input_ids"], strict=True):
            places, many = row.nonzero().flatten().tolist(), int((text > 1).sum())
            assert len(places) == max(1, round(ratio * many)) and places == list(range(places[0], places[-1] + 1))
            assert places[-1] < many, "the end and the padding are not masked"
            begins.add(places[0])
        read = batch["decoder_input_ids"]
        known = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], dim=1)
        assert torch.equal(read != MASK, known) and torch.equal(read[known], plain["input_ids"].roll(1, 1)[known])
    assert ratio == 1.0 or begins >= set(range(8))
    assert technique.report()["masked"] == pytest.approx(float(targets.sum()) / float((plain["input_ids"] > 1).sum()))
    assert "of the tokens in the last batch" in technique.summary()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_decoders_of_transformers_read_the_span_alone(name: str) -> None:
    """One place later; nothing of the text beside it comes to the loss but through the encoder."""
    net: Any = module("t5") if name == "t5" else of_family("bart")
    config, read, fed = net.model.config, list[Tensor](), list[Tensor]()
    decoder, encoder = net.model.get_decoder(), net.model.get_encoder()
    decoder.register_forward_pre_hook(lambda m, args, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True)
    encoder.register_forward_pre_hook(
        lambda m, args, kwargs: fed.append(kwargs.get("input_ids", *args[:1])), with_kwargs=True
    )
    batch = texts(4)
    trainer(masking(special_tokens=None), max_steps=1).fit(net, DataLoader([batch], batch_size=None))  # pyright: ignore[reportArgumentType]
    hidden = fed[-1] == MASK
    assert hidden.any() and torch.equal(fed[-1][~hidden], batch["input_ids"][~hidden])
    known = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
    assert torch.equal(read[-1][known], batch["input_ids"].roll(1, 1)[known])
    assert set(read[-1][~known].tolist()) <= {config.pad_token_id, config.decoder_start_token_id}


def test_the_papers_tokens() -> None:
    ids = torch.randint(3, 50, (400, 50), generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(1)
    chosen = spans(torch.ones_like(ids, dtype=torch.bool), 0.5, g)
    assert (chosen.sum(1) == 25).all()
    new = hide(ids, chosen, MASK, 0.8, 0.1, g)
    assert torch.equal(new[~chosen], ids[~chosen])
    share = float((new[chosen] == MASK).float().mean()), float((new[chosen] == ids[chosen]).float().mean())
    assert share == pytest.approx((0.8, 0.1 + 0.1 / 47), abs=0.02)
    assert decoder_input(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[False, True, True, False]]), 9).tolist() == [
        [9, 9, 6, 7]
    ]
    assert not spans(torch.zeros(2, 5, dtype=torch.bool), 0.5, g).any()


def test_batches_of_other_makes_and_draws_of_their_own() -> None:
    ids = texts()["input_ids"]
    first, second = seen(masking(keys=[0, 1]), (ids, ids), (ids, ids))  # one tensor for both
    assert torch.equal(first[0] == MASK, first[1] != IGNORE) and (first[0] == MASK).any()
    assert not torch.equal(first[0], second[0])
    again = seen(masking(keys=[0, 1]), (ids, ids), (ids, ids))
    assert torch.equal(again[1][0], second[0])


TEXTS = texts(4)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": TEXTS["input_ids"]}, r"found no tokens 'input_ids' and labels.*\['tokens'\] \(4, 24\)"),
        ({**TEXTS, "labels": TEXTS["labels"].roll(1, 1)}, "differ from the tokens 'input_ids' at"),
        ({**TEXTS, "labels": torch.full((4, 24), IGNORE)}, "none of the first batch's tokens may be masked"),
    ],
)
def test_what_is_no_text_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"SpanMasking.*{message}"):
        seen(masking(), batch)


def test_a_mask_token_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"SpanMasking: no config in HuggingFace has a mask_token_id.*T5"):
        trainer(SpanMasking(), max_steps=1).fit(module("t5"), DataLoader([TEXTS], batch_size=None))  # pyright: ignore[reportArgumentType]
    net: Any = module("t5", num_layers=1)
    net.model.config.mask_token_id = 7
    technique = SpanMasking()
    trainer(technique, max_steps=1).fit(net, DataLoader([TEXTS], batch_size=None))  # pyright: ignore[reportArgumentType]
    assert technique.report()["masked"] > 0.3


@pytest.mark.parametrize(
    "arguments",
    [{"ratio": 1.5}, {"hidden": -0.1}, {"random": 0.5}, {"mask_token_id": True}, {"keys": ["labels"]}, {"keys": "ids"}],
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"SpanMasking\(.*{next(iter(arguments))}=.*(expected|must)"):
        SpanMasking(**arguments)


def test_the_command_line_runs_it(tmp_path: Path) -> None:
    arguments = {"ratio": 0.5, "mask_token_id": 3}
    fit_yaml(tmp_path, "SpanMasking", arguments, model="Translator", data="Texts", max_steps=2)
