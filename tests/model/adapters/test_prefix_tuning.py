"""PrefixTuning against peft's own, and against attention that is written by hand; what trains, and what is refused."""

import copy
import pickle
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import PrefixTuning
from lightning_eff._core._attention.calls import Call
from lightning_eff.model.adapters._prompts.prefix import Prefixed, prefixed_attention
from tests import families
from tests.cases import Case, classifier
from tests.model.attention.nets import Net, replaced
from tests.models import TinyGPT, loader, make_batch, trainer
from tests.runs import fit_yaml

# peft asks transformers' models for it by the name of before
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CASES = {
    "PrefixTuning": Case(
        active=lambda: PrefixTuning(3),
        neutral=lambda: PrefixTuning(0),
        architecture=True,
        partial=True,
        stays="its prefixes are not tokens",
        lost=(classifier, "classifier", "found no attention in TinyClassifier"),
    )
}


def made(net: nn.Module) -> list[Prefixed]:
    return [m for m in net.modules() if isinstance(m, Prefixed)]


# -- the rule


@pytest.mark.parametrize("how", ["plain", "causal", "bool", "numbers", "both", "grouped", "one key's mask"])
def test_the_rule_is_a_softmax_over_the_prefix_and_the_keys(how: str) -> None:
    torch.manual_seed(0)
    heads, length, k = 2 if how == "grouped" else 4, 7, 3
    q = torch.randn(2, 4, length, 5, dtype=torch.float64)
    key, value = torch.randn(2, heads, length, 5).double(), torch.randn(2, heads, length, 6).double()
    p_k, p_v = torch.randn(heads, k, 5).double(), torch.randn(heads, k, 6).double()
    seen = torch.rand(2, 1, length, length) < 0.6
    term = torch.randn(2, 1, length, length).double()
    masks: dict[str, Any] = {"bool": seen, "both": seen, "numbers": term, "one key's mask": term[..., :1]}
    causal = how in ("causal", "both", "grouped")
    found = prefixed_attention(Call(q, key, value, masks.get(how), 0.0, causal, 0.3), p_k, p_v)
    for b in range(2):
        for h in range(4):
            g = h * heads // 4
            for i in range(length):
                scores = [0.3 * q[b, h, i] @ p_k[g, j] for j in range(k)]
                values = list(p_v[g])
                for j in range(length):
                    if (causal and j > i) or (how in ("bool", "both") and not seen[b, 0, i, j]):
                        continue
                    at = {"numbers": term[b, 0, i, j], "one key's mask": term[b, 0, i, 0]}.get(how, 0.0)
                    scores.append(0.3 * q[b, h, i] @ key[b, g, j] + at)
                    values.append(value[b, g, j])
                expected = torch.stack(scores).softmax(0) @ torch.stack(values)
                torch.testing.assert_close(found[b, h, i], expected, rtol=1e-10, atol=1e-12)


def from_peft(theirs: Any, net: nn.Module) -> None:
    """Give our module the numbers of peft's encoder, (k, layers * 2 * d) or the network that computes them."""
    encoder = theirs.prompt_encoder["default"]
    mine = made(net)
    with torch.no_grad():
        if not encoder.prefix_projection:
            rows = encoder.embedding.weight
            for m, part in zip(mine, rows.chunk(len(mine), dim=1), strict=True):
                keys, values = (t.unflatten(1, (m.shape[0], -1)).transpose(0, 1) for t in part.chunk(2, dim=1))
                m.get_parameter("prefix_keys").copy_(keys)
                m.get_parameter("prefix_values").copy_(values)
            return
        trunk: Any = mine[0].get_submodule("prefix_trunk")
        trunk.rows.copy_(encoder.embedding.weight)
        trunk.inner.load_state_dict(encoder.transform[0].state_dict())
        out = encoder.transform[2]
        for m, w, b in zip(mine, out.weight.chunk(len(mine)), out.bias.chunk(len(mine)), strict=True):
            m.get_parameter("prefix_weight").copy_(w)
            m.get_parameter("prefix_bias").copy_(b)


@pytest.mark.parametrize("hidden", [None, 24])
def test_it_computes_and_learns_what_peft_does(hidden: int | None) -> None:
    """peft moves the text by k positions, so its copy of the model has its table of positions moved by k as well."""
    k = 4
    plain = families.module("gpt2").double().eval()
    net = eff.apply(copy.deepcopy(plain), PrefixTuning(k, hidden=hidden)).eval()
    base = copy.deepcopy(plain.model)
    base.transformer.wpe.weight.data[k:] = plain.model.transformer.wpe.weight.data[:-k]
    how = {"prefix_projection": True, "encoder_hidden_size": hidden} if hidden else {}
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=k, **how)
    theirs: Any = peft.get_peft_model(base, config).double().eval()
    from_peft(theirs, net)
    batch = {n: t[:, :20] for n, t in families.batch("gpt2", 2).items()}
    right = torch.arange(20) < torch.tensor([[20], [13]])
    for mask in (torch.ones_like(right), right):
        given = {"input_ids": batch["input_ids"], "attention_mask": mask.long()}
        found, expected = net.model(**given).logits, theirs(**given).logits
        torch.testing.assert_close(found[mask], expected[mask], rtol=1e-9, atol=1e-9)
        assert (expected - plain.model(**given).logits).abs().max() > 1e-3
    net.model(**batch).loss.backward()
    theirs(**batch).loss.backward()
    encoder, mine = theirs.prompt_encoder["default"], made(net)
    if hidden is None:
        grads = [cast(Tensor, p.grad).transpose(0, 1).flatten(1) for p in net.parameters() if p.requires_grad]
        torch.testing.assert_close(torch.cat(grads, 1), encoder.embedding.weight.grad, rtol=1e-8, atol=1e-12)
    else:
        trunk: Any = mine[0].get_submodule("prefix_trunk")
        out = torch.cat([cast(Tensor, m.get_parameter("prefix_weight").grad) for m in mine])
        torch.testing.assert_close(out, encoder.transform[2].weight.grad, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(trunk.rows.grad, encoder.embedding.weight.grad, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(trunk.inner.weight.grad, encoder.transform[0].weight.grad, rtol=1e-8, atol=1e-12)
    count = sum(p.numel() for p in encoder.parameters())
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == count


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3_moe", "bert", "modernbert", "vit", "t5", "bart"])
def test_others_models_train_their_prefixes_alone(name: str) -> None:
    net, losses, steps = families.train(name, PrefixTuning(3))
    assert steps == families.STEPS and torch.tensor(losses).isfinite().all()
    plain = families.module(name).state_dict()
    moved = {n for n, p in net.named_parameters() if n not in plain or not torch.equal(p, plain[n])}
    assert moved == {n for n, p in net.named_parameters() if "prefix_" in n} and len(moved) == 2 * len(made(net))


def by_hand(call: Call, p_k: Tensor, p_v: Tensor) -> Tensor:
    """Attention to a prefix and the keys up to each query, or to all."""
    k = p_k.shape[1]
    scores = torch.cat([call.query @ p_k.transpose(1, 2), call.query @ call.key.transpose(2, 3)], 3) * call.scale
    if call.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(k + 1).bool(), -torch.inf)
    return scores.softmax(-1) @ torch.cat([p_v.expand(len(call.value), -1, -1, -1), call.value], 2)


@pytest.mark.parametrize("hidden", [None, 6])
@pytest.mark.parametrize("name", ["plain", "causal", "heads in front", "module", "encoder"])
@torch.no_grad()
def test_hand_written_attention_gets_prefixes(name: str, hidden: int | None) -> None:
    torch.manual_seed(0)
    plain = Net(name).double().eval()
    net = eff.apply(copy.deepcopy(plain), technique := PrefixTuning(3, hidden=hidden)).eval()
    ids = torch.randint(0, 61, (2, 13))
    prefixes = [m.keys_and_values() for m in made(net)]
    rest = iter(prefixes)
    with replaced(lambda call: by_hand(call, *next(rest))):
        expected = plain(ids)
    torch.testing.assert_close(net(ids), expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(expected, plain(ids), atol=1e-3) and technique.report()["attentions"] == 2
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(ids), net(ids))


def test_the_network_of_prefixes_is_shared_and_its_copies_share_their_own() -> None:
    net = eff.apply(Net("plain"), PrefixTuning(3, hidden=6))
    names = [n for n, p in net.named_parameters() if p.requires_grad]
    assert names == [n for n in net.state_dict() if "prefix_" in n] and sum("prefix_trunk" in n for n in names) == 3
    other = copy.deepcopy(net)
    ids = torch.randint(0, 61, (2, 13))
    with torch.no_grad():
        made(other)[0].get_parameter("prefix_trunk.rows").add_(1.0)
    assert not torch.equal(made(other)[1].keys_and_values()[0], made(net)[1].keys_and_values()[0])
    assert not torch.equal(other(ids), net(ids))


@pytest.mark.parametrize("hidden", [None, 6])
def test_zeros_are_a_key_of_zeros(hidden: int | None) -> None:
    net = eff.apply(Net("plain"), PrefixTuning(3, hidden=hidden, init="zero"))
    assert not any(p.any() for m in made(net) for p in m.keys_and_values())
    drawn = [m.keys_and_values()[0].detach() for m in made(eff.apply(Net("plain"), PrefixTuning(500)))]
    assert float(torch.cat(drawn).std()) == pytest.approx(1.0, rel=0.05) and not torch.equal(*drawn)


def test_generation_with_a_cache_is_that_without() -> None:
    net: Any = eff.apply(families.module("llama"), PrefixTuning(3)).eval()
    ids = torch.randint(1, 61, (2, 5))
    made_of = [net.model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=c) for c in (False, True)]
    assert torch.equal(*made_of)


def test_steps_are_those_of_prefixes_written_by_hand() -> None:
    """torch's AdamW on the prefixes alone; every other weight is bit for bit what it was."""
    torch.manual_seed(0)
    net = TinyGPT(2, dropout=0.0)
    plain = copy.deepcopy(net)
    before = copy.deepcopy(net.state_dict())
    eff.apply(net, PrefixTuning(5))
    mine = [nn.Parameter(p.detach().clone()) for p in net.parameters() if p.requires_grad]
    plain.requires_grad_(False)
    plain.log = lambda *args, **kwargs: None  # pyright: ignore[reportAttributeAccessIssue]
    optimizer = torch.optim.AdamW(mine, lr=net.lr)
    for batch in loader("tiny_gpt", shuffle=False):
        optimizer.zero_grad()
        rest = iter(mine)
        with replaced(lambda call, rest=rest: by_hand(call, next(rest), next(rest))):
            plain.training_step(batch, 0).backward()
        optimizer.step()
    t = trainer(PrefixTuning(5), max_steps=5)
    t.fit(net, loader("tiny_gpt", shuffle=False))
    for p, q in zip([p for p in net.parameters() if p.requires_grad], mine, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters() if n in before)
    held = {id(p) for group in t.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for p in net.parameters() if p.requires_grad}


def test_a_checkpoint_is_the_prefixes_and_loads_beside_the_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = TinyGPT(2)
    plain = copy.deepcopy(net)
    t = trainer(PrefixTuning(3, hidden=8), max_steps=2)
    t.fit(net, loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert len(saved) == 7 and all("prefix_" in name for name in saved)
    other = eff.apply(plain, PrefixTuning(3, hidden=8))
    _, unexpected = other.load_state_dict(saved, strict=False)
    x = make_batch("tiny_gpt")["input_ids"]
    assert not unexpected and torch.equal(other.eval()(x), net.eval()(x))


# -- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": -1}, r"length=-1\): expected an integer >= 0: k, the number of keys"),
        ({"hidden": 0}, r"hidden=0\): expected an integer >= 1"),
        ({"init": "vocabulary"}, r"init='vocabulary'\): expected 'normal' or 'zero'"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixTuning(**settings)


def test_what_cannot_get_a_prefix_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"PrefixTuning: found no attention in Net: .* ran without attention"):
        eff.apply(Net("by hand"), PrefixTuning(3))
    with pytest.raises(ValueError, match="it returns attention weights"):
        eff.apply(Net("module with weights"), PrefixTuning(3))
    with pytest.raises(ValueError, match="attends several times in a pass"):
        eff.apply(families.module("albert"), PrefixTuning(3))
    with pytest.raises(ValueError, match="has hooks"):
        eff.apply(families.module("wav2vec2"), PrefixTuning(3))


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "PrefixTuning", {"length": 3, "hidden": 8}, model="TinyGPT", data="Sequences", max_steps=3)


@pytest.mark.parametrize("hidden", [None, 8])
def test_blocks_on_fewer_tokens_keep_their_prefixes(hidden: int | None) -> None:
    """The test of whether a block can run on fewer tokens takes each token twice, and each row of a prefix too."""
    net = TinyGPT(4)
    t = trainer(PrefixTuning(3, hidden=hidden), eff.RandomLTD(start=0.25, until=0.8, multiple_of=4), max_steps=2)
    t.fit(net, loader("tiny_gpt"))
    assert t.global_step == 2
