"""SequenceLengthWarmup: lengths, the tokens that a step sees, and batches of every make."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

from lightning_eff._core._run.replicas import Replicas
from lightning_eff._core._tokens.sequences import (
    find_sequences,
    restart_positions,
    sequence_dims,
    shorten,
    split,
    unblind,
)
from lightning_eff._core.batches import tensors
from lightning_eff.data.curriculum.sequence_length_warmup import SequenceLengthWarmup, reshape_lengths, target_length
from tests.cases import Case, classifier
from tests.models import VOCAB, TinyGPT, flat, loader, make_batch, module, trainer

CASES = {
    "SequenceLengthWarmup": Case(
        active=lambda: SequenceLengthWarmup(start=8, until=0.7),
        neutral=lambda: SequenceLengthWarmup(start=8, until=0.0),
        refuses={"vit": "keys="},
        lost=(classifier, "classifier", "keys="),
    )
}

WHO = "who"
LANGUAGE = ["tiny_gpt", "gpt2", "llama", "bert"]


def cut(batch: Any, length: int, mode: str = "reshape", keys: Any = None, multiple_of: int = 8) -> Any:
    """The batch with shorter sequences, as the technique makes it."""
    found = find_sequences(batch, keys, multiple_of, who=WHO)
    return shorten(batch, found, length, reshape=mode == "reshape", who=WHO)


def ids(size: int = 4, length: int = 32) -> Tensor:
    """Token ids (B, T), all different, so that each can be followed."""
    return torch.arange(size * length).reshape(size, length)


class Spy(pl.LightningModule):
    """Takes batches of any make, remembers them, and learns nothing of note."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return self.w**2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def spy_on(net: pl.LightningModule) -> list[Any]:
    """The batches that the module's own training_step will get."""
    batches: list[Any] = []
    step = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        batches.append(batch)
        return step(batch, batch_idx)

    net.training_step = training_step  # type: ignore[method-assign]
    return batches


def seen(technique: SequenceLengthWarmup, batches: list[Any], **kwargs: Any) -> list[Any]:
    """What training_step gets of ``batches``, which the loader hands out as they are."""
    net = Spy()
    settings = {"max_steps": len(batches), **kwargs}
    trainer(technique, **settings).fit(net, DataLoader(batches, batch_size=None))
    return net.batches


def lengths(batches: list[Any], name: str = "input_ids") -> list[int]:
    return [batch[name].shape[1] for batch in batches]


# -- the rule


def test_target_grows_linearly_to_the_full_length() -> None:
    at = [target_length(u, start=64, full=1024, until=0.3) for u in (0.0, 0.15, 0.299999, 0.3, 0.7, 1.0)]
    assert at == pytest.approx([64, 544, 1024, 1024, 1024, 1024], abs=0.01)
    assert at[3] == at[4] == 1024


def test_reshape_lengths_are_divisors_and_multiples() -> None:
    assert reshape_lengths(1024, 64, 8) == (64, 128, 256, 512, 1024)
    assert reshape_lengths(96, 8, 8) == (8, 16, 24, 32, 48, 96)
    assert reshape_lengths(100, 8, 8) == ()


@pytest.mark.parametrize("full", [256, 200, 100])
def test_truncated_lengths_follow_the_target(full: int) -> None:
    technique = SequenceLengthWarmup(start=64, until=0.5, mode="truncate")
    us = [i / 96 for i in range(97)]  # 0.5 is among them
    got = [technique.length_of(full, u) for u in us]
    assert got == sorted(got) and got[0] == 64 and got[-1] == full
    for u, length in zip(us, got, strict=True):
        target = 64 + (full - 64) * u / 0.5
        assert length == full if u >= 0.5 else (length % 8 == 0 and 0 <= target - length < 8)


@pytest.mark.parametrize("full", [256, 1024, 192])
def test_reshaped_lengths_are_the_largest_divisor_below_the_target(full: int) -> None:
    technique = SequenceLengthWarmup(start=64, until=0.5)
    got = [technique.length_of(full, i / 96) for i in range(97)]
    assert got == sorted(got) and got[0] == 64 and got[-1] == full
    for i, length in enumerate(got):
        target = 64 + (full - 64) * (i / 96) / 0.5
        assert full % length == 0 and length % 8 == 0
        assert length == full or (
            length <= target and not any(length < d <= target for d in reshape_lengths(full, 1, 8))
        )


def test_a_start_between_two_divisors_begins_with_the_longer() -> None:
    technique = SequenceLengthWarmup(start=40, until=0.5)
    assert [technique.length_of(192, u) for u in (0.0, 0.01, 0.1, 0.2, 0.49, 0.5)] == [48, 48, 64, 96, 96, 192]


# -- cutting tensors


def test_sequence_dims_of_every_form() -> None:
    forms = {(4, 32): (1,), (4, 32, 7): (1,), (4, 32, 32): (1, 2), (4, 1, 32, 32): (2, 3), (4, 1, 1, 32): (3,)}
    forms |= {(4,): (), (4, 1): (), (4, 16): (), (4, 3, 32, 32): (), (1, 1, 32, 32): (2, 3)}
    assert {shape: sequence_dims(shape, 32) for shape in forms} == forms


def test_pieces_of_a_sample_lie_side_by_side_and_in_order() -> None:
    x = ids(3, 32)
    pieces = split(x, (1,), 8)
    assert pieces.shape == (12, 8) and pieces.is_contiguous()
    for sample in range(3):
        for k in range(4):
            assert torch.equal(pieces[4 * sample + k], x[sample, 8 * k : 8 * k + 8])


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 1, 32, 32), (3, 32, 32, 5)])
def test_square_masks_become_the_blocks_on_their_diagonal(shape: tuple[int, ...]) -> None:
    mask = torch.randn(shape)
    dims = sequence_dims(shape, 32)
    pieces = split(mask, dims, 8)
    flat_mask, got = mask.reshape(3, 32, 32, -1), pieces.reshape(12, 8, 8, -1)
    for i in range(12):
        rows = slice(8 * (i % 4), 8 * (i % 4) + 8)
        assert torch.equal(got[i], flat_mask[i // 4, rows, rows])
    assert pieces.shape == (12, *(8 if size == 32 else size for size in shape[1:]))


def test_position_ids_restart() -> None:
    whole = {"input_ids": ids(2, 32), "position_ids": torch.arange(32).repeat(2, 1)}
    assert torch.equal(cut(whole, 8)["position_ids"], torch.arange(8).repeat(8, 1))
    assert torch.equal(cut(whole, 8, "truncate")["position_ids"], torch.arange(8).repeat(2, 1))
    packed = torch.tensor([[5, 6, 7, 0, 1, 2, 0, 1]])
    assert restart_positions(packed).tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]


def test_tensors_of_one_sample_stand_for_all() -> None:
    causal = torch.ones(32, 32).tril().bool()
    whole = {
        "input_ids": ids(2, 32),
        "position_ids": torch.arange(32)[None],
        "bias": causal[None, None],
        "mask": causal,
    }
    short = cut(whole, 8)
    assert torch.equal(short["position_ids"], torch.arange(8).repeat(8, 1))
    assert torch.equal(short["bias"], causal[:8, :8].expand(8, 1, 8, 8))
    assert torch.equal(short["mask"], causal[:8, :8])
    first = cut(whole, 8, "truncate")
    assert torch.equal(first["position_ids"], torch.arange(8)[None])
    assert torch.equal(first["bias"], causal[None, None, :8, :8])


def test_what_samples_share_and_flags_do_not_tell_size_or_length() -> None:
    whole = {
        "position_ids": torch.arange(32)[None],
        "mask": torch.ones(32, 32).tril().long(),
        "input_ids": ids(2, 32),
        "flags": torch.ones(2, 5).bool(),
    }
    short = cut(whole, 8, "truncate")
    assert [tuple(t.shape) for t in short.values()] == [(1, 8), (8, 8), (2, 8), (2, 5)]


# -- batches of every make


@dataclass
class Sample:
    """A batch as a dataclass."""

    tokens: Tensor
    targets: Tensor


def makes() -> dict[str, Any]:
    x, y = ids(), ids() + 1000
    return {
        "dict": {"input_ids": x, "labels": y},
        "nested": {"inputs": {"ids": x, "embedded": torch.randn(4, 32, 5)}, "labels": [y]},
        "tuple": (x, y),
        "list": [x, y],
        "dataclass": Sample(x, y),
        "BatchEncoding": BatchEncoding({"input_ids": x, "labels": y}),
        "tensor": x,
        "other things": {"input_ids": x, "labels": y, "source": "book", "scale": torch.tensor(2.0), "no": None},
    }


@pytest.mark.parametrize("make", makes())
@pytest.mark.parametrize("mode", ["reshape", "truncate"])
def test_every_make_is_kept_and_labels_are_cut_with_the_tokens(make: str, mode: str) -> None:
    whole = makes()[make]
    untouched = [t.clone() for _, t in tensors(whole)]
    short = cut(whole, 8, mode)
    assert type(short) is type(whole)
    assert [path for path, _ in tensors(short)] == [path for path, _ in tensors(whole)]
    for (_, a), (_, b), c in zip(tensors(short), tensors(whole), untouched, strict=True):
        assert torch.equal(b, c), "the loader's own batch was changed"
        if b.ndim == 0:
            assert a is b
        elif mode == "reshape":
            assert torch.equal(a, torch.cat([x.reshape(4, 8, *b.shape[2:]) for x in b]))
        else:
            assert torch.equal(a, b[:, :8])
            assert a.is_contiguous()
    if isinstance(whole, Mapping) and "source" in whole:
        assert short["source"] == "book" and short["no"] is None


@pytest.mark.parametrize("make", [lambda t: t, lambda t: [t], lambda t: {"text": t}], ids=["tensor", "list", "dict"])
def test_a_lone_tensor_of_one_more_token_keeps_every_pair_of_input_and_target(make: Any) -> None:
    x = ids(3, 33)
    ((_, short),) = tensors(cut(make(x), 8))
    assert short.shape == (12, 9) and short.is_contiguous()
    assert torch.equal(short[:, :-1].reshape(3, 32), x[:, :-1])
    assert torch.equal(short[:, 1:].reshape(3, 32), x[:, 1:])
    ((_, first),) = tensors(cut(make(x), 8, "truncate"))
    assert torch.equal(first, x[:, :9])


def test_per_sample_tensors_stay_in_truncate_and_are_refused_in_reshape() -> None:
    whole = {"input_ids": ids(), "labels": torch.arange(4), "weight": torch.ones(4, 1)}
    short = cut(whole, 8, "truncate")
    assert short["labels"] is whole["labels"] and short["weight"] is whole["weight"]
    message = r"\['labels'\] \(4,\), \['weight'\] \(4, 1\).*Use mode='truncate'"
    with pytest.raises(ValueError, match=message):
        cut(whole, 8)


def test_keys_name_what_is_cut() -> None:
    x, y, same = torch.randn(4, 32, 6), ids(4, 16), torch.randn(4, 32)
    short = cut({"sound": x, "text": y, "same": same}, 8, "truncate", ["sound"])
    assert torch.equal(short["sound"], x[:, :8]) and short["text"] is y and short["same"] is same
    short = cut((x, torch.randn(4, 32)), 8, keys=[0, 1])
    assert short[0].shape == (16, 8, 6) and short[1].shape == (16, 8)
    short = cut({"inputs": {"a": x, "b": x[..., 0]}, "text": y}, 8, "truncate", ["inputs"])
    assert short["inputs"]["a"].shape == (4, 8, 6) and short["inputs"]["b"].shape == (4, 8) and short["text"] is y
    short = cut(Sample(x, y), 8, "truncate", ["tokens"])
    assert torch.equal(short.tokens, x[:, :8]) and short.targets is y
    assert torch.equal(cut(x, 8, "truncate", [0]), x[:, :8])


@pytest.mark.parametrize(
    ("batch", "keys", "message"),
    [
        (
            make_batch("vit"),
            None,
            r"no integer tensor of shape \(B, T\).*pixel_values'\] \(4, 1, 8, 8\) float32.*keys=",
        ),
        (
            make_batch("classifier"),
            None,
            r"no integer tensor.*\[0\] \(4, 8\) float32, \[1\] \(4,\) int64.*keys=\[0, 1\]",
        ),
        (
            {"input_ids": ids(4, 32), "labels": ids(4, 20)},
            None,
            r"\[\(4, 20\), \(4, 32\)\].*'labels'\] \(4, 20\).*keys=",
        ),
        (  # the nodes of graphs and the ends of their edges
            {
                "x": torch.zeros(19, 6),
                "edges": ids(2, 38),
                "of": torch.zeros(19, dtype=torch.long),
                "y": torch.zeros(4),
            },
            None,
            r"no integer tensor of shape \(B, T\) in the batch of 19 samples.*edges'\] \(2, 38\) int64",
        ),
        ({"input_ids": ids()}, ["ids"], r"keys=\['ids'\]\): \['ids'\] are not in the batch.*input_ids'\] \(4, 32\)"),
        ((ids(), ids()), [0, 2], r"\[2\] are not in the batch"),
        ({"x": ids(), "y": torch.arange(4)}, ["x", "y"], "fewer than two dimensions"),
        ({"a": ids(4, 32), "b": ids(4, 20)}, ["a", "b"], r"differ in \(B, T\)"),
    ],
)
def test_what_cannot_be_found_is_listed(batch: Any, keys: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_sequences(batch, keys, 8, who=WHO)


# -- masks


def padded() -> dict[str, Tensor]:
    """Two samples of 32 and 11 tokens, padded on the right."""
    mask = (torch.arange(32) < torch.tensor([[32], [11]])).long()
    x = torch.randint(1, VOCAB, (2, 32)) * mask
    return {"input_ids": x, "attention_mask": mask, "labels": x.masked_fill(mask == 0, -100)}


def test_a_piece_of_padding_alone_is_opened_and_stays_ignored() -> None:
    whole = padded()
    short = cut(whole, 8)
    mask = short["attention_mask"]
    assert mask.dtype == torch.long
    assert mask.sum(1).tolist() == [8, 8, 8, 8, 8, 3, 8, 8]  # the last two pieces were all padding
    assert (short["labels"][6:] == -100).all()
    assert torch.equal(mask[:6], whole["attention_mask"].reshape(8, 8)[:6])
    inverted = {"input_ids": whole["input_ids"], "src_key_padding_mask": whole["attention_mask"] == 0}
    hidden = cut(inverted, 8)["src_key_padding_mask"]
    assert hidden.dtype == torch.bool and hidden.sum(1).tolist() == [0, 0, 0, 0, 0, 5, 0, 0]


def test_blind_rows_of_square_masks_see_themselves() -> None:
    mask = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 0]])
    seen = [[1, 0, 0], [0, 1, 0], [1, 1, 0]]
    assert unblind(mask[None], (1, 2), hidden=0, seen=1)[0].tolist() == seen
    assert (
        unblind(mask[None, None].bool(), (2, 3), hidden=0, seen=1)[0, 0].tolist() == (torch.tensor(seen) == 1).tolist()
    )
    whole = padded()
    causal = (torch.ones(32, 32).tril() * whole["attention_mask"][:, None]).bool()
    additive = torch.zeros(causal.shape).masked_fill(~causal, float("-inf"))[:, None]
    short = cut({"input_ids": whole["input_ids"], "attention_mask": causal, "relative": additive}, 8)
    assert short["attention_mask"].any(-1).all()
    assert short["relative"].softmax(-1).isfinite().all()
    assert torch.equal(short["attention_mask"][5, 3:], torch.tensor([[1] * 3 + [0] * 5] * 5).bool())  # seen before too
    assert torch.equal(short["attention_mask"][6], torch.eye(8).bool())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("mode", ["reshape", "truncate"])
def test_padded_batches_have_a_finite_loss_and_gradient(name: str, mode: str) -> None:
    net = module(name)
    loss = net.training_step(cut(padded(), 8, mode), 0)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


def test_bert_pieces_of_padding_change_no_other_piece() -> None:
    net = module("bert")
    short = cut(padded(), 8)
    alone = {key: value[:6] for key, value in short.items()}
    torch.testing.assert_close(net.training_step(short, 0), net.training_step(alone, 0))


# -- in training


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("mode", ["reshape", "truncate"])
def test_in_training_lengths_grow_and_tokens_are_kept(name: str, mode: str) -> None:
    net, reference = module(name), loader(name, 48, shuffle=False)
    batches = spy_on(net)
    technique = SequenceLengthWarmup(start=8, until=0.5, mode=mode)  # type: ignore[arg-type]
    before = flat(net)
    trainer(technique, max_steps=12).fit(net, reference)
    assert not torch.equal(flat(net), before)
    got = lengths(batches)
    assert got == ([8, 8, 16, 16, 16, 16] if mode == "reshape" else [8, 8, 16, 16, 24, 24]) + [32] * 6
    for short, whole in zip(batches, reference, strict=True):
        length = short["input_ids"].shape[1]
        for key, value in whole.items():
            if mode == "reshape":
                assert short[key].numel() == 4 * 32
                assert torch.equal(short[key].reshape(4, 32), value)
            else:
                assert torch.equal(short[key], value[:, :length])


@pytest.mark.parametrize("make", ["dict", "tuple", "dataclass", "tensor"])
def test_from_until_on_the_loaders_own_batch_is_handed_on(make: str) -> None:
    batches = [makes()[make] for _ in range(8)]
    got = seen(SequenceLengthWarmup(start=8, until=0.5), batches)
    same = [
        all(
            a.data_ptr() == b.data_ptr() and a.shape == b.shape
            for (_, a), (_, b) in zip(tensors(x), tensors(y), strict=True)
        )
        for x, y in zip(got, batches, strict=True)
    ]
    assert same == [False] * 4 + [True] * 4
    handed: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, i: int) -> None:
            handed.append(batch)

    for start, expected in ((8, same), (32, [True] * 8)):
        net = Spy()
        handed.clear()
        technique = SequenceLengthWarmup(start=start, until=0.5)
        trainer(technique, Look(), max_steps=8).fit(net, DataLoader(batches, batch_size=None))
        assert [a is b for a, b in zip(net.batches, handed, strict=True)] == expected


def test_until_zero_and_start_at_the_full_length_are_plain_training() -> None:
    assert SequenceLengthWarmup(until=0.0).neutral and not SequenceLengthWarmup().neutral
    finals = []
    for callbacks in ([], [SequenceLengthWarmup(until=0.0)], [SequenceLengthWarmup(start=32)]):
        pl.seed_everything(5, verbose=False)
        net = module("tiny_gpt")
        trainer(*callbacks, max_steps=7).fit(net, loader("tiny_gpt"))
        finals.append(flat(net))
    assert torch.equal(finals[0], finals[1]) and torch.equal(finals[0], finals[2])


def test_the_reshaped_loss_is_that_of_the_pieces() -> None:
    """Attention ends at a piece's end, and positions start anew: as if the data set had had short samples."""
    whole = make_batch("tiny_gpt")
    net = TinyGPT(dropout=0.0)
    net.log = lambda *args: None  # type: ignore[method-assign]
    short = cut(whole, 8)
    pieces = [net.training_step({key: value[:, i : i + 8] for key, value in whole.items()}, 0) for i in range(0, 32, 8)]
    torch.testing.assert_close(net.training_step(short, 0), torch.stack(pieces).mean())


def test_a_lone_tensor_loses_no_target_in_training() -> None:
    class Shifting(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (x,) = batch
            targets.append(x[:, 1:].reshape(4, -1))
            return F.cross_entropy(self(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    targets: list[Tensor] = []
    data = torch.randint(0, VOCAB, (16, 33))
    trainer(SequenceLengthWarmup(start=8, until=1.0), max_steps=4).fit(
        Shifting(), DataLoader(TensorDataset(data), batch_size=4)
    )
    assert torch.equal(torch.cat(targets), data[:, 1:])


def test_length_holds_within_an_accumulation_window() -> None:
    batches = [{"input_ids": ids()} for _ in range(12)]
    technique = SequenceLengthWarmup(start=8, until=1.0, mode="truncate")
    got = lengths(seen(technique, batches, max_steps=4, accumulate_grad_batches=3))
    assert got == [8] * 6 + [16] * 3 + [24] * 3
    assert technique.state_dict()["used"] == {8: [0, 2], 16: [2, 1], 24: [3, 1]}


def test_the_last_batch_of_an_epoch_may_have_fewer_samples() -> None:
    net = module("gpt2")
    batches = spy_on(net)
    trainer(SequenceLengthWarmup(start=8, until=1.0), max_epochs=1).fit(net, loader("gpt2", 9))
    assert [tuple(b["input_ids"].shape) for b in batches] == [(16, 8), (8, 16), (2, 16)]


def test_batches_of_other_lengths_are_shortened_in_proportion_or_left_alone() -> None:
    full = [64, 32, 12, 16, 20, 64]  # 12 and 16 are not above start, 20 splits into no multiple of 8
    batches = [{"input_ids": ids(2, length)} for length in full]
    got = seen(SequenceLengthWarmup(start=16, until=1.0), batches)
    assert [tuple(b["input_ids"].shape) for b in got] == [(8, 16), (4, 16), (2, 12), (2, 16), (2, 20), (4, 32)]
    got = seen(SequenceLengthWarmup(start=16, until=1.0, mode="truncate"), batches)
    assert lengths(got) == [16, 16, 12, 16, 16, 56]


def test_manual_optimization_works() -> None:
    class Manual(Spy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    net = Manual()
    batches = DataLoader([{"input_ids": ids()} for _ in range(8)], batch_size=None)
    trainer(SequenceLengthWarmup(start=8, until=0.5), max_steps=8).fit(net, batches)
    assert lengths(net.batches) == [8, 8, 16, 16, 32, 32, 32, 32]
    assert net.w < 1


def test_evaluation_sees_the_full_length() -> None:
    class Evaluated(Spy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            evaluated.append(batch["input_ids"].shape[1])

    evaluated: list[int] = []
    batches = DataLoader([{"input_ids": ids()} for _ in range(2)], batch_size=None)
    trainer(SequenceLengthWarmup(start=8, until=1.0), max_steps=2, limit_val_batches=2).fit(
        Evaluated(), batches, batches
    )
    assert evaluated == [32, 32]


# -- what it tells


def test_report_and_summary() -> None:
    technique = SequenceLengthWarmup(start=64, until=0.5)
    logged: list[float] = []

    class Keep(DummyLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            logged.append(metrics["eff/sequence_length_warmup/length"])

    batches = DataLoader([{"input_ids": ids(1, 256)} for _ in range(12)], batch_size=None)
    trainer(technique, max_steps=12, logger=Keep(), log_every_n_steps=1).fit(Spy(), batches)
    assert logged == [64, 64, 128, 128, 128, 128] + [256] * 6
    assert technique.summary() == "64 for 2 steps, 128 for 4, 256 from step 6 on"
    assert technique.report() == {"length": 256}


def test_a_long_summary_is_cut_short() -> None:
    technique = SequenceLengthWarmup(start=8, until=0.9, mode="truncate")
    seen(technique, [{"input_ids": ids(1, 128)} for _ in range(32)])
    assert technique.summary() == "8 for 2 steps, 16 for 2, (12 more), 120 for 2, 128 from step 29 on"


def test_counters_go_on_after_a_resume(tmp_path: Path) -> None:
    def run(resume: Path | None = None) -> dict[str, Any]:
        technique = SequenceLengthWarmup(start=8, until=0.7)
        save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        callbacks = [technique] if resume else [technique, save]
        t = trainer(*callbacks, max_steps=10, enable_checkpointing=resume is None)
        t.fit(module("gpt2"), loader("gpt2"), ckpt_path=resume)
        return technique.state_dict()

    whole = run()
    assert whole["used"] == {8: [0, 3], 16: [3, 4], 32: [7, 3]}
    for step in (1, 4, 8):
        assert run(tmp_path / f"step={step}.ckpt") == whole
        state = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["callbacks"]["SequenceLengthWarmup"]
        assert sum(steps for _, steps in state["used"].values()) == step
        other = SequenceLengthWarmup()
        other.load_state_dict(state)
        assert other.state_dict() == state


def test_a_second_fit_starts_afresh() -> None:
    technique = SequenceLengthWarmup(start=8, until=0.5)
    for length in (64, 32):
        seen(technique, [{"input_ids": ids(2, length)} for _ in range(4)])
        assert technique.state_dict()["full"] == length


# -- what cannot be


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 0}, r"start=0\): expected an integer >= 1"),
        ({"start": 6.5}, r"start=6.5\): expected an integer >= 1"),
        ({"multiple_of": 0}, r"multiple_of=0\): expected an integer >= 1"),
        ({"start": 20}, r"start=20, multiple_of=8.*Use start=16 or 24"),
        ({"start": 4}, r"start=4, multiple_of=8.*Use start=8,"),
        ({"until": 1.5}, r"until=1.5\): expected a number in \[0, 1\]: the fraction of the budget"),
        ({"until": -0.1}, r"until=-0.1\): expected a number in"),
        ({"mode": "pad"}, r"mode='pad'\): expected 'reshape'.*or 'truncate'"),
        ({"keys": "labels"}, r"keys='labels'\): expected a list of names or positions"),
        ({"keys": []}, r"keys=\[\]\): expected a list"),
        ({"keys": [1.5]}, r"keys=\[1.5\]\): expected a list"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceLengthWarmup(**arguments)


@pytest.mark.parametrize(
    ("name", "technique", "message"),
    [
        ("vit", SequenceLengthWarmup(start=8), r"pixel_values'\] \(4, 1, 8, 8\).*keys="),
        ("t5", SequenceLengthWarmup(start=8), r"\[\(4, 20\), \(4, 32\)\].*keys="),
        (
            "gpt2",
            SequenceLengthWarmup(start=64),
            r"start=64\): the first batch has sequences of only 32 tokens.*smaller start",
        ),
        (
            "gpt2",
            SequenceLengthWarmup(start=24),
            r"at least 24 .*Use start=8 or 16, or multiple_of=1 .*mode='truncate'",
        ),
        (
            "gpt2",
            SequenceLengthWarmup(start=12, multiple_of=12),
            r"Use multiple_of=1 with start=1 or 2 or 4 or 8 or 16",
        ),
        ("labelled", SequenceLengthWarmup(start=8), r"\['labels'\] \(4,\).*mode='truncate'"),
        ("gpt2", SequenceLengthWarmup(start=8, keys=["text"]), r"\['text'\] are not in the batch"),
    ],
)
def test_a_first_batch_that_cannot_be_shortened_raises_before_any_weight_changes(
    name: str, technique: SequenceLengthWarmup, message: str
) -> None:
    net = module("gpt2" if name == "labelled" else name)
    before = flat(net)
    batch = make_batch("gpt2" if name in ("t5", "labelled") else name)
    if name == "t5":
        batch["labels"] = batch["labels"][:, :20].contiguous()
    if name == "labelled":
        batch["labels"] = torch.arange(4)
    with pytest.raises(ValueError, match=message):
        trainer(technique, max_steps=4).fit(net, DataLoader([batch] * 4, batch_size=None))
    assert torch.equal(flat(net), before)


def test_t5_trains_with_keys() -> None:
    net = module("t5")
    batches = spy_on(net)
    batch = make_batch("gpt2")
    batch["labels"] = batch["labels"][:, :20].contiguous()
    technique = SequenceLengthWarmup(start=8, until=0.5, mode="truncate", keys=["input_ids"])
    trainer(technique, max_steps=4).fit(net, DataLoader([batch] * 4, batch_size=None))
    assert [(b["input_ids"].shape[1], b["labels"].shape[1]) for b in batches] == [(8, 20), (16, 20), (32, 20), (32, 20)]


def test_a_length_that_becomes_ambiguous_later_raises() -> None:
    batches = [{"a": ids(4, 32), "b": ids(4, 32)}, {"a": ids(4, 32), "b": ids(4, 24)}, {}]
    with pytest.raises(ValueError, match=re.escape("[(4, 24), (4, 32)]")):
        seen(SequenceLengthWarmup(start=8, until=1.0), batches)


def test_from_until_on_batches_are_not_looked_at() -> None:
    batches = [{"a": ids(4, 32), "b": ids(4, 32)}] * 2 + [{"a": ids(4, 32), "b": ids(4, 24)}] * 2
    got = seen(SequenceLengthWarmup(start=8, until=0.5), batches)
    assert [(b["a"].shape[1], b["b"].shape[1]) for b in got] == [(8, 8), (16, 16), (32, 24), (32, 24)]


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SequenceLengthWarmup: the Trainer has no end"):
        seen(SequenceLengthWarmup(start=8), [{"input_ids": ids()}], max_steps=-1, max_epochs=-1)


def test_an_error_on_another_rank_is_raised_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the ranks whose first batch is well would wait for that one without end."""
    gathered: list[Any] = []

    def everyone(self: Replicas, value: Any) -> list[Any]:
        gathered.append(value)
        return [value, "sequences of 8 tokens"]

    monkeypatch.setattr(Replicas, "everyone", everyone)
    with pytest.raises(ValueError, match="On rank 1: sequences of 8 tokens"):
        seen(SequenceLengthWarmup(start=8), [{"input_ids": ids()}])
    with pytest.raises(ValueError, match=r"^SequenceLengthWarmup: found no integer tensor"):
        seen(SequenceLengthWarmup(start=8), [{"input_ids": ids().float()}])
    assert gathered[0] is None and "no integer tensor" in gathered[1]


def test_the_names_of_composer_are_accepted() -> None:
    technique = SequenceLengthWarmup(min_seq_length=16, duration=0.5, step_size=16)  # pyright: ignore[reportCallIssue]
    assert repr(technique) == "SequenceLengthWarmup(start=16, until=0.5, multiple_of=16)"
