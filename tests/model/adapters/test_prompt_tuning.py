"""PromptTuning against embeddings that are prefixed by hand, and against peft's own; what trains, and what is refused."""

import copy
import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import PromptTuning, Rematerialization
from tests import families
from tests.cases import Case, classifier
from tests.models import LENGTH, SHORT, VOCAB, TinyGPT, loader, make_batch, trainer
from tests.runs import fit, fit_yaml

# peft asks transformers' models for it by the name of before
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

NO_ROOM = "takes texts of 32 tokens, and not of 3 more for the prompts"
CASES = {
    "PromptTuning": Case(
        active=lambda: PromptTuning(3),
        neutral=lambda: PromptTuning(0),
        model="short",
        architecture=True,
        partial=True,
        stays="its prompts are not tokens",
        refuses={
            "gpt2": NO_ROOM,
            "bert": NO_ROOM,
            "tiny_gpt": NO_ROOM,
            "padded": NO_ROOM,
            "normed": NO_ROOM,
            "vit": "has no token embedding",
            "translator": "looks up tokens 2 times in a pass",
        },
        lost=(classifier, "classifier", "has no token embedding"),
    )
}


def prompts_of(net: nn.Module) -> nn.Parameter:
    (found,) = (p for name, p in net.named_parameters() if name.endswith(".prompts"))
    return found


def texts(name: str, length: int = 20) -> dict[str, Tensor]:
    return {key: value[:, :length].contiguous() for key, value in families.batch(name, 2).items()}


class ByHand(TinyGPT):
    """TinyGPT on embeddings that are prefixed by hand; logits of the text's own places."""

    prompts: nn.Parameter

    def forward(self, ids: Tensor) -> Tensor:
        k = len(self.prompts)
        x = torch.cat([self.prompts.expand(len(ids), -1, -1), self.embed(ids)], dim=1)
        x = x + self.position.weight[: x.shape[1]]
        assert self.blocks is not None
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))[:, k:]


# -- the rule

FAMILIES = ["gpt2", "llama", "gemma", "bloom", "roberta", "modernbert", "albert", "mamba", "qwen3_moe", "electra"]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_it_is_the_plain_network_on_embeddings_prefixed_by_hand(name: str) -> None:
    plain = families.module(name)
    net = eff.apply(copy.deepcopy(plain), technique := PromptTuning(k := 4, init="uniform"))
    batch = texts(name)
    table: Any = plain.model.get_input_embeddings()
    assert prompts_of(net).abs().max() <= 0.5
    x = torch.cat([prompts_of(net).expand(2, -1, -1), table(batch["input_ids"])], dim=1)
    expected = plain.eval().model(inputs_embeds=x).logits[:, k:]
    found = net.eval().model(**batch)
    torch.testing.assert_close(found.logits, expected, rtol=1e-5, atol=1e-6)
    assert (expected - plain.model(**batch).logits).abs().max() > 1e-4
    shifted = {"input": expected, "target": batch["labels"]}
    if families.FAMILIES[name].kind == "causal":
        shifted = {"input": expected[:, :-1], "target": batch["labels"][:, 1:]}
    loss = F.cross_entropy(shifted["input"].flatten(0, 1), shifted["target"].flatten())
    if "moe" not in name:  # whose loss has more to it
        torch.testing.assert_close(found.loss, loss)
    d = table.weight.shape[1]
    assert technique.report() == {
        "trained": k * d,
        "frozen": sum(p.numel() for p in plain.parameters()),
        "prompts": k,
    }


@torch.no_grad()
def test_padding_and_places_go_along_as_in_peft() -> None:
    """peft's own prompt tuning, with the same prompts, on texts that are padded on either side, and given places."""
    plain = families.module("gpt2")
    net = eff.apply(copy.deepcopy(plain), PromptTuning(4))
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    theirs: Any = peft.get_peft_model(copy.deepcopy(plain.model), config)
    theirs.prompt_encoder["default"].embedding.weight.copy_(prompts_of(net))
    ids = texts("gpt2")["input_ids"]
    right = torch.arange(20) < torch.tensor([[20], [13]])
    for mask in (right.long(), right.flip(1).long(), right):
        found = net.eval().model(input_ids=ids, attention_mask=mask).logits
        expected = theirs.eval()(input_ids=ids, attention_mask=mask.long()).logits[:, 4:]
        keep = mask.bool()
        torch.testing.assert_close(found[keep], expected[keep], rtol=1e-5, atol=1e-6)
    places = torch.arange(20).expand(2, -1)
    given = net.model(input_ids=ids, position_ids=places).logits
    torch.testing.assert_close(given, net.model(input_ids=ids).logits)
    states = net.model(input_ids=ids, output_hidden_states=True).hidden_states
    assert [s.shape[1] for s in states] == [20] * 5


def test_steps_are_those_of_prompts_written_by_hand() -> None:
    """torch's AdamW on the prompts alone; every other weight is bit for bit what it was."""
    torch.manual_seed(0)
    net = TinyGPT(2, dropout=0.0)
    before = copy.deepcopy(net.state_dict())
    by_hand = ByHand(2, dropout=0.0)
    by_hand.load_state_dict(before)
    eff.apply(net, PromptTuning(5))
    by_hand.requires_grad_(False)
    by_hand.prompts = nn.Parameter(prompts_of(net).detach().clone())
    optimizer = torch.optim.AdamW([by_hand.prompts], lr=net.lr)
    by_hand.log = lambda *args, **kwargs: None  # pyright: ignore[reportAttributeAccessIssue]
    for batch in loader("short", shuffle=False):
        optimizer.zero_grad()
        by_hand.training_step(batch, 0).backward()
        optimizer.step()
    t = trainer(PromptTuning(5), max_steps=5)
    t.fit(net, loader("short", shuffle=False))
    torch.testing.assert_close(prompts_of(net), by_hand.prompts, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters() if not n.endswith("prompts"))
    held = [p for group in t.optimizers[0].param_groups for p in group["params"]]
    assert len(held) == 1 and held[0] is prompts_of(net)


def test_a_trial_of_longer_texts_is_not_measured_by_a_plan_of_what_is_kept() -> None:
    """Rematerialization sees each block once in the passes that it measures, though prompts are tried within them."""
    planned = Rematerialization(policy="optimal", memory_budget=0.7)
    net, _ = fit("short", lambda: [planned, PromptTuning(3)])
    alone, _ = fit("short", lambda: [PromptTuning(3)])
    assert torch.equal(prompts_of(net), prompts_of(alone))
    assert planned.report()["recomputed_calls"] > 0


# -- where they begin, and where they go


def test_prompts_begin_at_rows_of_the_table_none_twice() -> None:
    net = eff.apply(TinyGPT(2), PromptTuning(40))
    same = (prompts_of(net)[:, None] == net.embed.weight[None]).all(-1)
    assert same.any(1).all() and same.sum(0).max() == 1
    assert len(prompts_of(eff.apply(TinyGPT(2), PromptTuning(2 * VOCAB + 1)))) == 2 * VOCAB + 1


def test_it_says_which_calls_get_them(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        eff.apply(families.module("gpt2"), PromptTuning(3))
        eff.apply(TinyGPT(2), PromptTuning(3))
    assert "3 prompts of 32 numbers in each call of model.transformer (GPT2Model); trains 96 parameters" in caplog.text
    assert "3 prompts of 16 numbers in each call of the module (TinyGPT)" in caplog.text


def test_a_copy_has_prompts_of_its_own() -> None:
    net = eff.apply(TinyGPT(2), PromptTuning(3)).eval()
    other = copy.deepcopy(net)
    x = make_batch("short")["input_ids"]
    with torch.no_grad():
        assert torch.equal(net(x), other(x))
        prompts_of(other).add_(1.0)
        assert not torch.equal(net(x), other(x))


def test_a_tied_head_goes_on_with_the_table() -> None:
    net: Any = eff.apply(families.module("gpt2"), PromptTuning(3))
    assert net.model.lm_head.weight is net.model.get_input_embeddings().weight
    with torch.no_grad():
        whole = net.eval().model.generate(texts("gpt2", 4)["input_ids"], max_new_tokens=3, use_cache=False)
    assert whole.shape == (2, 7)
    with pytest.raises(ValueError, match=r"past_key_values is a cache of keys and values.*use_cache=False"):
        net.model.generate(texts("gpt2", 4)["input_ids"], max_new_tokens=3, use_cache=True)


def test_a_checkpoint_is_the_prompts_and_loads_beside_the_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = TinyGPT(2)
    plain = copy.deepcopy(net)
    t = trainer(PromptTuning(3), max_steps=2)
    t.fit(net, loader("short"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == {"embed.prompts"}
    other = eff.apply(plain, PromptTuning(3))
    missing, unexpected = other.load_state_dict(saved, strict=False)
    assert not unexpected and "embed.prompts" not in missing
    x = make_batch("short")["input_ids"]
    assert torch.equal(other.eval()(x), net.eval()(x))


# -- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": -1}, r"length=-1\): expected an integer >= 0: the number of prompts"),
        ({"init": "zero"}, r"init='zero'\): expected 'vocabulary' or 'uniform'"),
        (
            {"embeddings": ""},
            r"embeddings=''\): expected a dotted path, or None: the dotted path of the token embedding",
        ),
        ({"also": "head"}, r"also='head'\): expected a list of dotted paths"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptTuning(**settings)


def test_a_later_longer_text_without_room_is_told() -> None:
    net = eff.apply(TinyGPT(2), PromptTuning(8)).eval()
    x = make_batch("tiny_gpt")["input_ids"]
    assert net(x[:, :SHORT]).shape == (4, SHORT, VOCAB)
    with pytest.raises(
        ValueError, match=rf"takes texts of {LENGTH} tokens, and not of 8 more.*room for {LENGTH + 8} positions"
    ):
        net(x)
    assert net(x[:, :SHORT]).shape == (4, SHORT, VOCAB)


class Reads(TinyGPT):
    """Logits go by some id too: token 0 is padding, or each is what it is."""

    padding = True

    def forward(self, ids: Tensor) -> Tensor:
        seen = (ids != 0).float() if self.padding else 1.0 + ids
        return super().forward(ids) * seen.mean(1)[:, None, None]


class Past(TinyGPT):
    """Its step calls forward by itself."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.forward(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class Along(TinyGPT):
    """Its forward takes weights of tokens."""

    def forward(self, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        found = super().forward(ids)
        return found if weights is None else found * weights[..., None]


def test_what_cannot_be_is_refused_in_words() -> None:
    x = make_batch("short")["input_ids"]
    net = Reads(2)
    eff.apply(net, PromptTuning(3))(x)  # another token than that of padding stands for them
    net.padding = False
    with pytest.raises(ValueError, match="reads ids elsewhere than in its token embedding, as for n-grams"):
        net(make_batch("tiny_gpt", length=SHORT + 1)["input_ids"])
    with pytest.raises(
        ValueError, match=r"weights \(4, 24\) runs along the text, and its values for prompts are unknown"
    ):
        eff.apply(Along(2), PromptTuning(3))(x, torch.ones(4, SHORT))
    with pytest.raises(ValueError, match="training_step did not call the module itself, whose calls get the prompts"):
        trainer(PromptTuning(3), max_steps=2).fit(Past(2), loader("short"))
    with pytest.raises(ValueError, match="looks up tokens 2 times in a pass, as encoder-decoders do"):
        eff.apply(families.module("t5"), PromptTuning(3))
    with pytest.raises(ValueError, match="has no token embedding"):
        eff.apply(families.module("vit"), PromptTuning(3))


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "PromptTuning", {"length": 3}, model="TinyGPT", data="Short", max_steps=3)
