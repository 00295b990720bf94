"""BitFit: the biases move as a hand-written loop moves them, nothing else does, and checkpoints hold them alone."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_eff as eff
from lightning_eff import BitFit
from lightning_eff.model.adapters.bit_fit import biases
from tests import families
from tests.cases import Case, no_map
from tests.families import HuggingFace
from tests.models import TinyClassifier, TinyGPT, loader, trainer
from tests.runs import fit, fit_yaml

NO_BIAS = "has no bias to train"
CASES = {
    "BitFit": Case(
        active=lambda: BitFit(),
        neutral=lambda: BitFit(names=[]),
        architecture=True,
        partial=True,
        refuses={"llama": NO_BIAS},
        lost=(no_map, "classifier", NO_BIAS),
    )
}


def save(net: Any, technique: Any, path: Path, steps: int = 3, data: str = "tiny_gpt") -> dict[str, Any]:
    t = trainer(technique, max_steps=steps)
    t.fit(net, loader(data))
    t.save_checkpoint(path)
    return torch.load(path, weights_only=True)


# -- the rule


def test_biases_move_as_by_a_loop_written_by_hand_and_nothing_else_does() -> None:
    """torch's AdamW on the biases alone, with the same batches; every other weight is bit for bit what it was."""
    torch.manual_seed(0)
    net = TinyGPT(2, dropout=0.0)
    by_hand = copy.deepcopy(net)
    before = copy.deepcopy(net.state_dict())
    data = list(loader("tiny_gpt", shuffle=False))
    mine = [p for name, p in by_hand.named_parameters() if name.endswith("bias")]
    for p in by_hand.parameters():
        p.requires_grad_(any(p is one for one in mine))
    optimizer = torch.optim.AdamW(mine, lr=by_hand.lr)
    by_hand.log = lambda *args, **kwargs: None  # pyright: ignore[reportAttributeAccessIssue]
    for batch in data:
        optimizer.zero_grad()
        by_hand.training_step(batch, 0).backward()
        optimizer.step()
    t = trainer(BitFit(), max_steps=len(data))
    t.fit(net, loader("tiny_gpt", shuffle=False))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), by_hand.parameters(), strict=True))
    for name, p in net.named_parameters():
        assert torch.equal(p, before[name]) != name.endswith("bias"), name
    held = [p for group in t.optimizers[0].param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in biases(net).values()} == {id(p) for p in t.optimizers[0].state}
    assert all(p.grad is None for name, p in net.named_parameters() if not name.endswith("bias"))


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "modernbert", "vit", "resnet", "t5", "qwen3"])
def test_on_models_of_others(name: str) -> None:
    named = dict(families.module(name).named_parameters())
    expected = {n for n, p in named.items() if n.rpartition(".")[2] == "bias"}
    if not expected:
        with pytest.raises(ValueError, match=NO_BIAS):
            eff.apply(families.module(name), BitFit())
        return
    net, _, steps = families.train(name, technique := BitFit())
    assert steps == families.STEPS
    moved = {n for n, p in net.named_parameters() if not torch.equal(p, families.module(name).get_parameter(n))}
    assert moved and moved <= expected
    assert technique.report() == {
        "trained": sum(named[n].numel() for n in expected),
        "frozen": sum(p.numel() for n, p in named.items() if n not in expected),
    }


# -- what trains


def test_names_and_what_trains_beside() -> None:
    net = eff.apply(TinyGPT(2), BitFit(["blocks.1.*"], also=["head"]))
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert trained == {"head.weight"} | {name for name in biases(net) if name.startswith("blocks.1.")}
    exported = eff.export(net)
    assert all(p.requires_grad for p in exported.parameters())


def test_biases_by_other_names_are_found() -> None:
    net = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2, bias=False))
    assert [*biases(net)] == ["0.in_proj_bias", "0.out_proj.bias", "1.bias", "2.bias"]


def test_it_says_what_trains(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        eff.apply(TinyGPT(2), BitFit())
    assert "BitFit: 13 biases: norm.bias, blocks.*.norm1.bias (2)" in caplog.text
    assert "; trains " in caplog.text


def test_schedulers_go_on_with_groups_that_are_empty_now() -> None:
    """A group of matrices alone and one of vectors, under a function for each; the first has nothing to train."""

    class Grouped(HuggingFace):
        def configure_optimizers(self) -> Any:
            matrices = [p for p in self.parameters() if p.ndim > 1]
            optimizer = torch.optim.SGD(
                [{"params": matrices}, {"params": [p for p in self.parameters() if p.ndim < 2]}], 0.1
            )
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 1.0, lambda e: 0.5**e])]

    _, _, steps = families.train("vit", BitFit(), cls=Grouped)
    assert steps == families.STEPS


# -- checkpoints


def test_a_checkpoint_is_kilobytes_and_holds_what_trains_and_all_buffers(tmp_path: Path) -> None:
    saved = save(TinyClassifier(), BitFit(), tmp_path / "a.ckpt", data="classifier")
    assert saved["state_dict"].keys() == {*biases(TinyClassifier())} | {
        name for name, _ in TinyClassifier().named_buffers()
    }
    large = TinyGPT(4, dim=128)
    saved = save(large, BitFit(), tmp_path / "b.ckpt")
    whole = sum(p.numel() * 4 for p in large.parameters())
    numbers = 4 * sum(p.numel() for p in biases(large).values())
    assert sum(value.numel() * 4 for value in saved["state_dict"].values()) == numbers
    assert (tmp_path / "b.ckpt").stat().st_size < whole / 10
    save(TinyGPT(4, dim=128), BitFit(save="all"), tmp_path / "c.ckpt")
    assert (tmp_path / "c.ckpt").stat().st_size > whole
    plain = TinyGPT(4, dim=128)
    plain.load_state_dict(torch.load(tmp_path / "c.ckpt", weights_only=True)["state_dict"], strict=True)


def test_another_base_is_refused(tmp_path: Path) -> None:
    """What is frozen is not in the checkpoint: beside other weights, what was trained means nothing."""
    torch.manual_seed(0)
    net = TinyGPT(2)
    other = copy.deepcopy(net)
    save(net, BitFit(), tmp_path / "a.ckpt")
    with torch.no_grad():
        other.blocks[1].qkv.weight.mul_(-1)  # pyright: ignore[reportOptionalSubscript]
    with pytest.raises(
        ValueError,
        match=r"are not those of the checkpoint's run: blocks\.1\.qkv\.weight\. Load the weights that the run started",
    ):
        trainer(BitFit(), max_steps=5).fit(other, loader("tiny_gpt"), ckpt_path=tmp_path / "a.ckpt")


def test_frozen_weights_that_others_move_are_in_the_checkpoint(tmp_path: Path) -> None:
    """OrthogonalInit writes them at the first batch, which a resumed run does not do again."""
    saved = save(net := TinyGPT(2), BitFit(), tmp_path / "plain.ckpt")
    assert "blocks.0.qkv.weight" not in saved["state_dict"]
    t = trainer(BitFit(), eff.OrthogonalInit(), max_steps=3)
    t.fit(net := TinyGPT(2), loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(saved["blocks.0.qkv.weight"], net.blocks[0].qkv.weight)  # pyright: ignore[reportOptionalSubscript]
    assert "embed.weight" not in saved


def test_it_is_validated_from_its_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = TinyGPT(2)
    other = copy.deepcopy(net)
    save(net, BitFit(), tmp_path / "a.ckpt")
    t = trainer(BitFit(), limit_val_batches=1)
    t.validate(other, loader("tiny_gpt"), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


# -- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"names": "bias"},
            r"names='bias'\): expected a list of dotted paths or patterns, or None: patterns of biases",
        ),
        ({"also": "head"}, r"also='head'\): expected a list of dotted paths or patterns: patterns of parameters"),
        ({"save": "none"}, r"save='none'\): expected 'adapter' or 'all': what checkpoints hold"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BitFit(**settings)


def test_names_that_mean_none_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"it matches none of the .* biases of TinyGPT.*Nearest: .*qkv"):
        eff.apply(TinyGPT(2), BitFit(["qvk.bias"]))
    with pytest.raises(
        ValueError,
        match=r"\(also=\[.haed.\]\): it matches none of the .* parameters and modules of TinyGPT.*Nearest: .*head",
    ):
        eff.apply(TinyGPT(2), BitFit(also=["haed"]))


def test_nothing_left_to_train_is_refused() -> None:
    net = TinyGPT(2).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing of TinyGPT is left to train"):
        eff.apply(net, BitFit())


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "BitFit", {"also": ["head"]}, keeps_state=True, max_steps=3)


def test_a_run_is_that_of_apply() -> None:
    net, _ = fit("tiny_gpt", lambda: [BitFit()], max_steps=1)
    assert {n for n, p in net.named_parameters() if p.requires_grad} == {*biases(net)}
