"""LoRA against peft itself: the same layers, steps and folders; what trains, what is merged, and what checkpoints hold."""

import copy
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import lightning_eff as eff
from lightning_eff import LoRA
from lightning_eff._core import rng
from tests import families
from tests.cases import Case, no_map
from tests.families import HuggingFace
from tests.models import TinyGPT, hugging_face, loader, make_batch, trainer
from tests.runs import fit, fit_yaml

CASES = {
    "LoRA": Case(
        active=lambda: LoRA(rank=4),
        neutral=lambda: LoRA(names=[]),
        architecture=True,
        partial=True,
        lost=(no_map, "classifier", "has no linear layer to act on"),
    )
}
# peft asks transformers' models for it by the name of before
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
FAMILIES = ("gpt2", "qwen3", "modernbert", "vit", "t5", "qwen3_moe")
VARIANTS: list[dict[str, Any]] = [{}, {"dora": True}, {"pissa": True}, {"rslora": True, "alpha": 3}]


def logits(net: Any, name: str) -> Tensor:
    with torch.no_grad():
        return net.eval()(**families.batch(name, 2)).logits


def shaken(net: nn.Module) -> nn.Module:
    """What trains is moved, as by training."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return net


# -- against peft


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_unchanged_at_first_merged_as_unmerged_and_read_by_peft(
    name: str, variant: dict[str, Any], tmp_path: Path
) -> None:
    """B = 0 is the plain function; export merges; and peft, given the folder, computes the same."""
    plain = families.module(name)
    net = eff.apply(copy.deepcopy(plain), LoRA(rank=4, **variant))
    rough = {"rtol": 1e-5, "atol": 1e-5} if variant.get("pissa") else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(logits(net.model, name), logits(plain.model, name), **rough)
    shaken(net)
    learnt = logits(net.model, name)
    assert (learnt - logits(plain.model, name)).abs().max() > 1e-3
    exported = eff.export(net)
    assert exported.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(logits(exported.model, name), learnt, rtol=1e-5, atol=1e-5)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(plain.model), eff.export_adapter(net.model, tmp_path))  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(logits(loaded, name), learnt, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_steps_are_those_of_peft_itself(variant: dict[str, Any]) -> None:
    """The same model under ``peft.get_peft_model``, from the same factors, under torch's AdamW in a loop."""
    plain = families.module("gpt2")
    net = copy.deepcopy(plain)
    settings = {"use_dora": variant.get("dora", False), "use_rslora": variant.get("rslora", False)}
    config = peft.LoraConfig(
        r=4,
        lora_alpha=variant.get("alpha", 8),
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
        init_lora_weights="pissa" if variant.get("pissa") else True,
        **settings,
    )
    theirs: Any = peft.get_peft_model(copy.deepcopy(plain.model), config)
    torch.manual_seed(5)
    ours = eff.apply(net, LoRA(rank=4, **variant))
    state = {f"base_model.model.{name}": p for name, p in ours.model.state_dict().items()}
    theirs.load_state_dict(state, strict=True)
    before = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=ours.lr)
    for batch in loader("gpt2", shuffle=False):
        optimizer.zero_grad()
        theirs(**batch).loss.backward()
        optimizer.step()
    technique = LoRA(rank=4, **variant)
    trainer(technique, max_steps=5).fit(ours, loader("gpt2", shuffle=False))
    for name, p in theirs.named_parameters():
        mine = ours.model.get_parameter(name.removeprefix("base_model.model."))
        torch.testing.assert_close(mine, p, rtol=1e-6, atol=1e-7)
        assert torch.equal(p, before[name]) != ("lora_" in name)


def test_a_step_of_a_map_is_the_papers() -> None:
    """By hand: ``h = W x + b + (alpha / r) B A x``, and gradients of A and B alone."""
    net = eff.apply(nn.Sequential(nn.Linear(6, 5)), LoRA(rank=2, alpha=3, names=["0"]))
    shaken(net)
    layer: Any = net[0]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    w, bias, x = layer.base_layer.weight, layer.base_layer.bias, torch.randn(7, 6)
    torch.testing.assert_close(net(x), F.linear(x, w, bias) + 1.5 * x @ a.T @ b.T)
    net(x).square().sum().backward()
    assert a.grad is not None and b.grad is not None and w.grad is None and bias.grad is None
    large = eff.apply(nn.Sequential(nn.Linear(16, 16)), LoRA(rank=16, alpha=2, rslora=True, names=["0"]))
    assert large[0].scaling["default"] == 2 / math.sqrt(16)  # pyright: ignore[reportIndexIssue]


def test_pissa_has_the_largest_singular_values_in_its_factors() -> None:
    torch.manual_seed(0)
    w = torch.randn(12, 9)
    plain = nn.Sequential(nn.Linear(9, 12))
    with torch.no_grad():
        plain[0].weight.copy_(w)
    net: Any = eff.apply(copy.deepcopy(plain), LoRA(rank=3, pissa=True, names=["0"]))
    s = torch.linalg.svdvals(w)
    torch.testing.assert_close(torch.linalg.svdvals(net[0].get_delta_weight("default"))[:3], s[:3])
    torch.testing.assert_close(torch.linalg.svdvals(net[0].base_layer.weight)[:6], s[3:], rtol=1e-4, atol=1e-5)


def test_pissa_that_fails_leaves_weights_as_they_were() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.register_forward_hook(lambda *args: None)

    net = Two()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="has hooks"):
        eff.apply(net, LoRA(rank=2, pissa=True, names=["a", "b"]))
    assert type(net.a) is nn.Linear and all(torch.equal(p, before[name]) for name, p in net.state_dict().items())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of the plain encoder, which reads
@pytest.mark.parametrize("padded", [False, True])
def test_torchs_own_encoder_calls_what_it_would_read_in_evaluation(padded: bool) -> None:
    """Its kernel reads the maps' weights; with factors beside them the layers compute in evaluation what training does."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    plain = nn.Sequential(nn.TransformerEncoder(layer, 2))
    net = shaken(eff.apply(copy.deepcopy(plain), LoRA(rank=2)))
    x = torch.randn(2, 5, 16)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    keep = ~mask if mask is not None else torch.ones(2, 5, dtype=torch.bool)
    learnt = net.train()[0](x, src_key_padding_mask=mask)[keep]
    for one in (net, eff.export(net)):
        with torch.no_grad():
            seen = one.eval()[0](x, src_key_padding_mask=mask)[keep]
        torch.testing.assert_close(seen, learnt, rtol=1e-4, atol=1e-5)
    assert (learnt - plain.eval()[0](x, src_key_padding_mask=mask)[keep]).abs().max() > 1e-3


# -- what trains


def test_only_what_trains_is_in_the_optimizer() -> None:
    net = hugging_face("gpt2")
    t = trainer(technique := LoRA(rank=2, also=["ln_f"]), max_steps=2)
    t.fit(net, loader("gpt2"))
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    factors = {name for name in trained if "lora_" in name}
    assert trained - factors == {"model.transformer.ln_f.weight", "model.transformer.ln_f.bias"}
    assert len(factors) == 4 * 4 * 2
    held = [p for group in t.optimizers[0].param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(net.get_parameter(name)) for name in trained}
    assert len(t.optimizers[0].state) == len(trained)
    numbers = 4 * 2 * ((32 + 96) + (32 + 32) + (32 + 128) + (128 + 32))
    assert technique.report() == {
        "trained": numbers + 64,
        "frozen": sum(p.numel() for p in net.parameters()) - numbers - 64,
        "maps": 16,
    }


class Scheduled(HuggingFace):
    """A group that decays and one that does not, whose rates go down by a scheduler."""

    scheduler: Any = staticmethod(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step))

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-3, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": type(self).scheduler(optimizer), "interval": "step"},
        }


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda step: 0.5**step, lambda step: 1.0]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [1e-3, 2e-3], total_steps=10),
    "two": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_b_goes_at_a_multiple_of_as_rate_at_every_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA+; against peft's own groups: B's rate is the ratio times A's, decay as before."""
    monkeypatch.setattr(Scheduled, "scheduler", staticmethod(SCHEDULERS[name]))
    seen: list[tuple[float, float]] = []

    class Watch(families.Losses):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            rates: dict[str, set[float]] = {"A": set(), "B": set()}
            names = {id(p): n for n, p in pl_module.named_parameters()}
            for group in trainer.optimizers[0].param_groups:
                for p in group["params"]:
                    rates["B" if ".lora_B." in names[id(p)] else "A"].add(group["lr"])
                    assert group["weight_decay"] == 0.1
            (a,), (b,) = rates["A"], rates["B"]
            seen.append((a, b))

    families.train("gpt2", LoRA(rank=2, b_rate=16.0), Watch(), cls=Scheduled)
    assert len(seen) == families.STEPS
    assert len({a for a, _ in seen}) > 1
    for a, b in seen:
        assert b == pytest.approx(16 * a)


def test_maps_are_those_of_the_blocks_and_are_printed(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        eff.apply(TinyGPT(2), LoRA(rank=4))
    assert (
        "LoRA: factors of rank 4 on 8 linear layers: blocks.*.qkv (2), blocks.*.proj (2), blocks.*.mlp.*" in caplog.text
    )
    assert "head (16 to 61) (it is outside the blocks)" in caplog.text


def test_what_others_put_in_trains_too() -> None:
    """Numbers that begin at zero would otherwise stay there."""
    net = eff.apply(TinyGPT(2), eff.ReZero(), LoRA(rank=2))
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    assert sum("lora_" in name for name in trained) > 0
    assert sum("branch_scale" in name for name in trained) == 4


# -- checkpoints


def test_a_checkpoint_is_kilobytes_and_loads_beside_the_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = TinyGPT(4, dim=128)
    plain = copy.deepcopy(net)
    whole = sum(p.numel() * 4 for p in net.parameters())
    t = trainer(LoRA(rank=1), max_steps=3)
    t.fit(net, loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").stat().st_size < whole / 10
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert all("lora_" in name for name in saved["state_dict"])
    x = make_batch("tiny_gpt")["input_ids"]
    other = eff.apply(plain, LoRA(rank=1))
    missing, unexpected = other.load_state_dict(saved["state_dict"], strict=False)
    assert not unexpected and not any("lora_" in name for name in missing)
    assert torch.equal(other.eval()(x), net.eval()(x))


def test_another_base_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    t = trainer(LoRA(rank=2), max_steps=2)
    t.fit(TinyGPT(2), loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    torch.manual_seed(9)
    with pytest.raises(ValueError, match="Load the weights that the run started with"):
        trainer(LoRA(rank=2), max_steps=4).fit(TinyGPT(2), loader("tiny_gpt"), ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "settings", [{"pissa": True}, {"dora": True, "dropout": 0.1}, {"b_rate": 4.0}, {"save": "all"}], ids=str
)
def test_other_settings_resume_exactly(settings: dict[str, Any], tmp_path: Path) -> None:
    from tests.runs import resume_from_every_step

    assert resume_from_every_step("tiny_gpt", lambda: [LoRA(rank=2, **settings)], tmp_path) == {}


def test_frozen_weights_that_the_module_puts_anew_are_saved(tmp_path: Path) -> None:
    """As BYOL averages its target, ``t.data = m * t.data + (1 - m) * o.data``: that is no change in place, and a small one."""

    class Averaging(TinyGPT):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            blocks: Any = self.blocks
            weight = blocks[0].mlp[0].base_layer.weight
            flat = weight.data.flatten() * 1.0
            flat[1::4] = torch.nextafter(flat[1::4], torch.tensor(9.0))
            weight.data = flat.view_as(weight)

    torch.manual_seed(0)
    t = trainer(LoRA(rank=2), max_steps=2)
    net = Averaging(2)
    t.fit(net, loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    name = "blocks.0.mlp.0.base_layer.weight"
    assert [key for key in saved if key.endswith("base_layer.weight")] == [name]
    assert torch.equal(saved[name], net.state_dict()[name])


def test_a_head_that_trains_is_saved_for_peft(tmp_path: Path) -> None:
    plain = families.module("vit")
    net = shaken(eff.apply(copy.deepcopy(plain), LoRA(rank=2, also=["classifier"])))
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(plain.model), eff.export_adapter(net.model, tmp_path))  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(logits(loaded, "vit"), logits(net.model, "vit"))
    partly = eff.apply(copy.deepcopy(plain), LoRA(rank=2, also=["classifier.bias"]))
    with pytest.raises(ValueError, match=r"classifier.bias was trained, but not its whole module"):
        eff.export_adapter(partly.model, tmp_path)
    with pytest.raises(ValueError, match="nothing in HuggingFace was made by peft"):
        eff.export_adapter(plain, tmp_path)


@pytest.mark.parametrize("also", [["model.transformer.wte"], ["model.lm_head"]])
def test_peft_reads_a_tied_embedding_that_trains(also: list[str], tmp_path: Path) -> None:
    """peft copies each module that is saved as a whole, so both ends of the tie are among them."""
    plain = families.module("gpt2")
    assert plain.model.lm_head.weight is plain.model.transformer.wte.weight
    net = shaken(eff.apply(copy.deepcopy(plain), LoRA(rank=2, also=also)))
    folder = eff.export_adapter(net.model, tmp_path)
    learnt = logits(net.model, "gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of the tie
        loaded: Any = peft.PeftModel.from_pretrained(copy.deepcopy(plain.model), folder)  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(logits(loaded, "gpt2"), learnt, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(logits(loaded.merge_and_unload(), "gpt2"), learnt, rtol=1e-5, atol=1e-5)


# -- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"rank=0\): expected an integer >= 1"),
        ({"alpha": 0}, r"alpha=0\): expected a finite number > 0, or None: the scale"),
        ({"dropout": 1.0}, r"dropout=1.0\): expected a number in \[0, 1\): the probability"),
        ({"b_rate": -1}, r"b_rate=-1\): expected a finite number > 0: the ratio of B's learning rate"),
        ({"names": "q_proj"}, r"names='q_proj'\): expected a list of dotted paths or patterns, or None"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRA(**settings)


def test_what_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"no linear layer of TinyGPT is named 'qvk'; .*Nearest: .*qkv"):
        eff.apply(TinyGPT(2), LoRA(names=["qvk"]))
    with pytest.raises(ValueError, match=r"rank=17\): the full rank of blocks.0.qkv \(16 to 48\) is 16\. Give rank=16"):
        eff.apply(TinyGPT(2), LoRA(rank=17, names=["qkv"]))
    with pytest.raises(ValueError, match=r"no linear layer in TinyGPT to adapt.*full rank is 16, below rank=32"):
        eff.apply(TinyGPT(2), LoRA(rank=32))
    with pytest.raises(ValueError, match=r"b_rate=2\): LBFGS has no learning rate for each group"):

        class Own(TinyGPT):
            def configure_optimizers(self) -> Any:
                return torch.optim.LBFGS(self.parameters())

        trainer(LoRA(rank=2, b_rate=2), max_steps=1).fit(Own(2), loader("tiny_gpt"))


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "LoRA", {"rank": 2, "b_rate": 4.0}, max_steps=3)


def test_a_run_is_that_of_apply() -> None:
    net, _ = fit("tiny_gpt", lambda: [LoRA(rank=2)], max_steps=1)
    assert set(net.state_dict()) == set(eff.apply(TinyGPT(), LoRA(rank=2)).state_dict())


def test_arguments_have_the_names_of_peft_too() -> None:
    known = LoRA(r=4, lora_alpha=2.0, lora_dropout=0.1, target_modules=["qkv"], modules_to_save=["head"], use_dora=True)  # pyright: ignore[reportCallIssue]
    assert (known.rank, known.alpha, known.dropout, known.names, known.also) == (4, 2.0, 0.1, ["qkv"], ["head"])
    assert known.dora and LoRA(use_rslora=True, loraplus_lr_ratio=16.0).rslora  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="these are two names of one argument"):
        LoRA(rank=4, r=8)  # pyright: ignore[reportCallIssue]


# -- many layers


def _made_by_peft(base: nn.Module, config: peft.LoraConfig) -> nn.Module:
    own = copy.copy(config)
    own.fan_in_fan_out = isinstance(base, Conv1D)
    return peft.tuners.lora.Linear(
        base, "default", own, own.r, own.lora_alpha, is_target_conv_1d_layer=isinstance(base, Conv1D)
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_copied_layers_equal_those_that_peft_makes(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peft makes one layer of each kind; the others have the values that peft would draw, in tensors of their own."""
    plain = nn.ModuleList(
        [
            *(nn.Linear(8, 12) for _ in range(3)),
            *(nn.Linear(8, 12, bias=False) for _ in range(3)),
            *(nn.Linear(12, 8, dtype=torch.bfloat16) for _ in range(3)),
            *(Conv1D(12, 8) for _ in range(3)),
        ]
    )
    by_peft: list[nn.Module] = []
    original = peft.tuners.lora.Linear.update_layer
    monkeypatch.setattr(
        peft.tuners.lora.Linear,
        "update_layer",
        lambda m, *args, **kwargs: by_peft.append(m) or original(m, *args, **kwargs),
    )
    torch.manual_seed(7)
    net = eff.apply(copy.deepcopy(plain), LoRA(rank=4, alpha=3, dropout=dropout))
    assert len(by_peft) == 4  # layers
    monkeypatch.undo()
    config = peft.LoraConfig(r=4, lora_alpha=3, lora_dropout=dropout)
    for path, base in plain.named_children():
        first = next(p for p in base.parameters())
        torch.set_default_dtype(first.dtype)
        with rng.keyed(7, "LoRA", path):
            wanted = _made_by_peft(base, config)
        torch.set_default_dtype(torch.float32)
        made = net.get_submodule(path)
        torch.testing.assert_close(dict(made.state_dict()), dict(wanted.state_dict()), rtol=0.0, atol=0.0)
        own = {key for key in made.__dict__ if key.startswith("lightning_eff_") or key.startswith("_lightning_eff_")}
        assert made.__dict__.keys() - own == wanted.__dict__.keys()
        for name, value in wanted.__dict__.items():
            if not name.startswith("_") and name != "base_layer":
                assert made.__dict__[name] == value, name
        assert [(n, p.requires_grad) for n, p in made.named_parameters() if "lora_" in n] == [
            (n, p.requires_grad) for n, p in wanted.named_parameters() if "lora_" in n
        ]
    shared = [v for m in net.modules() for v in m.__dict__.values() if isinstance(v, dict | list | set)]
    assert len({id(v) for v in shared}) == len(shared)


def test_layers_whose_copies_would_differ_are_made_by_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of peft may draw other numbers, or keep something that a copy would share."""
    original = peft.tuners.lora.Linear.reset_lora_parameters

    def drawing_more(m: Any, *args: Any) -> None:
        torch.rand(1)
        original(m, *args)

    monkeypatch.setattr(peft.tuners.lora.Linear, "reset_lora_parameters", drawing_more)
    torch.manual_seed(7)
    net = eff.apply(nn.ModuleList([nn.Linear(8, 12), nn.Linear(8, 12)]), LoRA(rank=4))
    for path, m in net.named_children():
        with rng.keyed(7, "LoRA", path):
            wanted = _made_by_peft(nn.Linear(8, 12, device="meta").to_empty(device="cpu"), peft.LoraConfig(r=4))
        name = "lora_A.default.weight"
        torch.testing.assert_close(m.get_parameter(name), wanted.get_parameter(name), rtol=0.0, atol=0.0)
