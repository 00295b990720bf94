"""Architectures changed in a run and by ``apply``, and made plain again by ``export``."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff._core._architecture.folding import CannotFold
from lightning_eff._core._architecture.linear_maps import choose, stacked
from lightning_eff._core._architecture.record import applied, described
from tests.cases import Case
from tests.core.architectures import BiasesOnly, Halved, LowRankAdapter, ScalarNorm
from tests.models import HuggingFace, TinyClassifier, TinyGPT, flat, loader, make_batch, module, trainer
from tests.runs import checkpoints, fit

VOCAB = 61

EXAMPLES = {
    "LowRankAdapter": Case(active=lambda: LowRankAdapter(), neutral=lambda: LowRankAdapter(rank=0), architecture=True),
    "ScalarNorm": Case(
        active=lambda: ScalarNorm(),
        neutral=lambda: ScalarNorm(),
        architecture=True,
        stays="ScalarNorm replaced LayerNorm at .*: one number takes the place",
    ),
}


def qwen3() -> HuggingFace:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return HuggingFace(Qwen3ForCausalLM(config).train())


def mixtral() -> HuggingFace:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
    )
    return HuggingFace(MixtralForCausalLM(config).train())


MODELS: dict[str, Any] = {
    "tiny_gpt": lambda: module("tiny_gpt", dropout=0.0),
    **{name: lambda name=name: module(name) for name in ("gpt2", "bert", "vit", "t5", "classifier")},
    "qwen3": qwen3,
    "mixtral": mixtral,
}


def build(name: str) -> pl.LightningModule:
    pl.seed_everything(1, verbose=False)
    return MODELS[name]()


def outputs(net: Any, name: str) -> Tensor:
    batch = make_batch(name)
    net.eval()
    with torch.no_grad():
        if name == "classifier":
            return net(batch[0])
        return net(batch["input_ids"]) if name == "tiny_gpt" else net.model(**batch).logits


def train(net: pl.LightningModule, name: str, *callbacks: pl.Callback, steps: int = 3, **kwargs: Any) -> pl.Trainer:
    pl.seed_everything(1, verbose=False)
    t = trainer(*callbacks, max_steps=steps, **kwargs)
    t.fit(net, loader(name if name not in ("qwen3", "mixtral") else "gpt2"))
    return t


class FirstState(pl.Callback):
    """The weights as training begins."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = copy.deepcopy(pl_module.state_dict())


# -- a run and `apply` are one, and `export` undoes both


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_run_apply_and_export_agree(name: str, tmp_path: Path) -> None:
    plain, net, first = build(name), build(name), FirstState()
    t = train(net, name, LowRankAdapter(), first)
    by_hand = build(name)
    pl.seed_everything(1, verbose=False)
    assert eff.apply(by_hand, LowRankAdapter()) is by_hand
    assert list(by_hand.state_dict()) == list(first.state)
    assert all(torch.equal(value, first.state[key]) for key, value in by_hand.state_dict().items())
    assert type(by_hand) is type(plain)
    state = plain.state_dict()
    assert set(by_hand.state_dict()) > set(state), "the plain module's names stay"
    assert all(torch.equal(state[key], first.state[key]) for key in state)
    t.save_checkpoint(tmp_path / "last.ckpt")
    by_hand.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"], strict=True)
    learnt = outputs(net, name)
    assert (learnt - outputs(plain, name)).abs().max() > 0.01, "nothing was learnt"
    for trained in (net, by_hand, copy.deepcopy(net), pickle.loads(pickle.dumps(by_hand))):
        exported = eff.export(trained)
        assert list(exported.state_dict()) == list(state)
        assert [t.shape for t in exported.state_dict().values()] == [t.shape for t in state.values()]
        assert {m.__class__ for m in exported.modules()} == {m.__class__ for m in plain.modules()}
        assert [p.requires_grad for p in exported.parameters()] == [p.requires_grad for p in plain.parameters()]
        assert [sorted(m.__dict__) for m in exported.modules() if m is not exported] == [
            sorted(m.__dict__) for m in plain.modules() if m is not plain
        ]
        torch.testing.assert_close(outputs(exported, name), learnt, rtol=0, atol=1e-5)
        plain.load_state_dict(exported.state_dict(), strict=True)
        torch.testing.assert_close(outputs(plain, name), learnt, rtol=0, atol=1e-5)
    assert torch.equal(outputs(net, name), learnt), "export left its argument as it was"
    train(eff.export(net), name)  # an ordinary module, which trains
    train(net, name, LowRankAdapter())  # and so does the other, further


def test_only_the_adapters_are_trained() -> None:
    net, first = build("tiny_gpt"), FirstState()
    train(net, "tiny_gpt", LowRankAdapter(names=["qkv", "mlp.0"]), first)
    moved = {key for key, value in net.state_dict().items() if not torch.equal(value, first.state[key])}
    adapted = {f"blocks.{i}.{at}" for i in range(4) for at in ("qkv", "mlp.0")}
    assert {key for key in moved if key.startswith(tuple(adapted))} == {
        f"{at}.{n}" for at in adapted for n in ("up", "down")
    }
    assert "head.weight" in moved
    assert adapted == {path for path, m in net.named_modules() if type(m).__name__ == "Adapted"}


def test_new_parameters_depend_on_the_seed_alone() -> None:
    def downs(seed: int, draws: int) -> Tensor:
        net = build("classifier")
        torch.manual_seed(seed)
        torch.rand(draws)
        state = torch.get_rng_state()
        eff.apply(net, LowRankAdapter())
        assert torch.equal(torch.get_rng_state(), state), "the global stream was drawn from"
        return net.state_dict()["head.1.down"]

    assert torch.equal(downs(1, 0), downs(1, 7))
    assert not torch.equal(downs(1, 0), downs(2, 0))


def test_new_parameters_are_like_those_that_are_there() -> None:
    net = eff.apply(build("classifier").to(torch.bfloat16), LowRankAdapter())
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16} and torch.get_default_dtype() is torch.float32
    on_meta = eff.apply(build("classifier").to("meta"), LowRankAdapter())
    assert all(p.is_meta for p in on_meta.parameters())
    with pytest.raises(ValueError, match=r"blocks.0.0.weight is on the meta device; expected whole weights"):
        eff.export(on_meta)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_under_bf16(precision: Any) -> None:
    net = build("tiny_gpt")
    train(net, "tiny_gpt", LowRankAdapter(), precision=precision)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {p.dtype for p in net.parameters()} == {dtype} == {p.dtype for p in eff.export(net).parameters()}
    tolerance = 0.1 if precision == "bf16-true" else 1e-5
    torch.testing.assert_close(outputs(eff.export(net), "tiny_gpt"), outputs(net, "tiny_gpt"), rtol=0, atol=tolerance)


def test_layers_that_configure_model_or_setup_build() -> None:
    whole = set(eff.apply(build("tiny_gpt"), LowRankAdapter()).state_dict())
    for built in ("setup", "configure_model"):
        net = TinyGPT(built=built, dropout=0.0)
        train(net, "tiny_gpt", LowRankAdapter())
        assert set(net.state_dict()) == whole
    assert set(eff.apply(TinyGPT(built="configure_model"), LowRankAdapter()).state_dict()) == whole


def test_plain_modules_and_parts() -> None:
    net = eff.apply(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)), LowRankAdapter())
    for p in net.parameters():
        nn.init.normal_(p)
    x = torch.randn(5, 3)
    exported = eff.export(net)
    assert set(exported.state_dict()) == {"0.weight", "0.bias", "2.weight"}
    torch.testing.assert_close(exported(x), net(x))
    part = eff.export(net[0])  # a part by itself, which is a replacement
    assert type(part) is nn.Linear
    torch.testing.assert_close(part(x), net[0](x))
    assert type(net[0]).__name__ == "Adapted"


def test_what_was_never_applied_is_copied() -> None:
    net = build("classifier")
    exported = eff.export(net)
    assert exported is not net and torch.equal(flat(exported), flat(net))


# -- order, twice, settings


def test_several_act_in_their_own_order() -> None:
    both = [
        eff.apply(build("tiny_gpt"), *given)
        for given in ([ScalarNorm(), LowRankAdapter()], [LowRankAdapter(), ScalarNorm()])
    ]
    assert [[r.technique for r in applied(net)] for net in both] == [["ScalarNorm", "LowRankAdapter"]] * 2
    assert list(both[0].state_dict()) == list(both[1].state_dict())
    assert torch.equal(flat(both[0]), flat(both[1]))
    net = build("tiny_gpt")
    train(net, "tiny_gpt", LowRankAdapter(), ScalarNorm())
    assert list(net.state_dict()) == list(both[0].state_dict())
    with pytest.raises(
        ValueError, match=r"was already changed by LowRankAdapter\(.*which comes after ScalarNorm. Give them together"
    ):
        eff.apply(eff.apply(build("tiny_gpt"), LowRankAdapter()), ScalarNorm())


def test_twice_is_once_and_other_settings_are_refused() -> None:
    net = eff.apply(build("tiny_gpt"), LowRankAdapter())
    state = copy.deepcopy(net.state_dict())
    eff.apply(net, LowRankAdapter())
    train(net, "tiny_gpt", LowRankAdapter(), steps=0)
    assert list(net.state_dict()) == list(state) and len(applied(net)) == 1
    with pytest.raises(
        ValueError, match=r"was already changed by LowRankAdapter\(rank=2, .*, not LowRankAdapter\(rank=3"
    ):
        eff.apply(net, LowRankAdapter(rank=3))
    with pytest.raises(ValueError, match="LowRankAdapter and LowRankAdapter cannot train together"):
        eff.apply(build("tiny_gpt"), LowRankAdapter(), LowRankAdapter(rank=3))
    within = TinyClassifier()
    within.head = eff.apply(within.head, LowRankAdapter())
    with pytest.raises(ValueError, match="was already changed"):
        eff.apply(within, LowRankAdapter(rank=3))
    assert eff.apply(within, LowRankAdapter(rank=0)) is within and len(applied(within)) == 1


def test_what_is_no_architecture_is_refused_in_words() -> None:
    net: Any = build("classifier")
    with pytest.raises(
        TypeError, match=r"got SharpnessAwareMinimization; expected .*LowRankAdapter.*Trainer's callbacks"
    ):
        eff.apply(net, eff.SharpnessAwareMinimization())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="got the class LowRankAdapter; expected an instance"):
        eff.apply(net, LowRankAdapter)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"got a module and no technique; expected one or more .*ScalarNorm"):
        eff.apply(net)
    with pytest.raises(TypeError, match="got LowRankAdapter; expected a module"):
        eff.apply(LowRankAdapter(), net)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"lightning_eff.export: got dict; expected an nn.Module"):
        eff.export({})  # pyright: ignore[reportArgumentType]


# -- what does not fold, and what cannot be swapped


def test_what_does_not_fold_says_why() -> None:
    net = build("tiny_gpt")
    train(net, "tiny_gpt", ScalarNorm(), LowRankAdapter())
    message = (
        r"TinyGPT cannot be made plain. ScalarNorm replaced LayerNorm at blocks.0.norm1, .* and others: one number takes the"
        r" place of two vectors. Keep the module as it is, and build it by lightning_eff.apply\(plain"
    )
    with pytest.raises(ValueError, match=message):
        eff.export(net)
    exported = eff.export(net.blocks[0].qkv)  # pyright: ignore[reportOptionalSubscript, reportArgumentType]
    assert type(exported) is nn.Linear


def test_frozen_parameters_take_gradients_again() -> None:
    plain = build("tiny_gpt")
    plain.embed.weight.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue]
    expected = [p.requires_grad for p in plain.parameters()]
    net = eff.apply(plain, BiasesOnly(), LowRankAdapter(names=["qkv"]))
    assert {n.rpartition(".")[2] for n, p in net.named_parameters() if p.requires_grad} == {"bias"}
    exported = eff.export(net)
    assert [p.requires_grad for p in exported.parameters()] == expected


class Tied(nn.Module):
    """A head that uses the embedding's very weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids))))


def test_tied_weights() -> None:
    net = eff.apply(Tied(), LowRankAdapter())
    assert type(net.head) is nn.Linear and net.head.weight is net.embed.weight  # left alone, and still tied
    exported = eff.export(net)
    assert exported.head.weight is exported.embed.weight
    net = eff.apply(Tied(), LowRankAdapter(names=["head"]))  # asked for by name
    assert net.head.weight is net.embed.weight
    same = eff.export(net)
    assert same.head.weight is same.embed.weight, "an adapter that learnt nothing leaves the tie"
    nn.init.ones_(net.head.up)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match="What LowRankAdapter learnt at head folds into its weight, but embed uses this tensor too"
    ):
        eff.export(net)

    class Fresh(ScalarNorm):
        def change(self, surgeon: Any) -> None:
            surgeon.swap(lambda path, m: path == "head", lambda m: nn.Linear(5, 7), what="a head")

    net = Tied()
    with pytest.raises(ValueError, match=r"Fresh: head \(Linear\) shares its weight with embed, .*no longer be tied"):
        eff.apply(net, Fresh())
    assert net.head.weight is net.embed.weight and not applied(net)


def test_shared_modules_stay_shared() -> None:
    shared = nn.Linear(3, 3)
    net = eff.apply(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}), LowRankAdapter())
    assert net["a"] is net["b"][0]  # pyright: ignore[reportIndexIssue]
    nn.init.ones_(net["a"].up)  # pyright: ignore[reportArgumentType]
    exported = eff.export(net)
    assert exported["a"] is exported["b"][0] and type(exported["a"]) is nn.Linear  # pyright: ignore[reportIndexIssue]


class Direct(TinyClassifier):
    """Computes with the weights of ``head`` and does not call it."""

    how = "linear"

    def forward(self, x: Tensor) -> Tensor:
        fc: Any = self.head[1]
        hidden = self.norm(self.blocks(x))
        if self.how == "linear":
            return F.linear(hidden, fc.weight, fc.bias)
        return hidden @ fc.weight.T + fc.bias


@pytest.mark.parametrize("how", ["linear", "matmul"])
def test_a_forward_that_uses_weights_itself_is_told(how: str) -> None:
    net = Direct()
    net.how = how
    with pytest.raises(
        ValueError, match=r"Direct uses head.1.weight directly \(.*\) and does not call head.1.* no effect"
    ):
        train(net, "classifier", LowRankAdapter())
    assert "forward" not in net.head[1].__dict__
    train(Direct(), "classifier", LowRankAdapter(names=["blocks.*"]))


def test_penalties_on_weights_are_no_bypass() -> None:
    net = TinyClassifier()
    step = net.training_step
    net.training_step = lambda batch, batch_idx: (  # type: ignore[method-assign]
        step(batch, batch_idx) + sum((w @ w.T).pow(2).sum() for w in net.parameters() if w.ndim == 2)
    )
    train(net, "classifier", LowRankAdapter())


def test_a_plain_module_held_in_a_list_is_told() -> None:
    class Held(TinyClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [self.head[1]]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](self.norm(self.blocks(x)))

    with pytest.raises(ValueError, match=r"Held uses head.1.weight directly \(linear\)"):
        train(Held(), "classifier", LowRankAdapter())


def test_attention_that_does_not_call_its_projection_is_left_alone() -> None:
    net = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    chosen, left = choose(net, None, who="X")
    assert [m.path for m in chosen] == ["1"] and "nn.MultiheadAttention, which does not call it" in str(left)
    with pytest.raises(ValueError, match=r"0.out_proj \(4 to 4\) cannot be replaced: its weight is used by"):
        choose(net, ["out_proj"], who="X")


def test_experts_in_one_parameter_are_left_alone_in_words(caplog: Any) -> None:
    net = build("mixtral")
    found = stacked(net)
    assert len(found) == 4 and all("4 linear layers in one parameter" in reason for reason in found.values()), found
    with caplog.at_level("INFO"):
        eff.apply(net, LowRankAdapter())
    assert "4 linear layers in one parameter of MixtralExperts" in caplog.text
    with pytest.raises(
        ValueError,
        match=r"no linear layer of HuggingFace is named 'w1'; .* The linear layers are q_proj, .*gate_up_proj: 4 linear layers",
    ):
        eff.apply(build("mixtral"), LowRankAdapter(names=["w1"]))


def test_nothing_found_is_an_error_with_the_candidates() -> None:
    net = nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU())
    with pytest.raises(ValueError, match=r"LowRankAdapter: Sequential has no linear layer to act on"):
        eff.apply(net, LowRankAdapter())
    with pytest.raises(
        ValueError,
        match=r"ScalarNorm: Sequential has no LayerNorm to act on; expected one or more. It has 1 Conv1d.*Remove ScalarNorm\.$",
    ):
        eff.apply(net, ScalarNorm())
    with pytest.raises(ValueError, match="the module itself is a linear map"):
        eff.apply(nn.Linear(2, 2), LowRankAdapter())


@pytest.mark.parametrize("kind", ["weight_norm", "parametrized", "hook", "forward", "lazy"])
def test_what_a_replacement_would_lose_is_refused(kind: str) -> None:
    fc = nn.LazyLinear(2) if kind == "lazy" else nn.Linear(2, 2)
    if kind == "weight_norm":
        torch.nn.utils.parametrizations.weight_norm(fc)
    elif kind == "parametrized":
        torch.nn.utils.parametrizations.orthogonal(fc)
    elif kind == "hook":
        fc.register_forward_hook(lambda *_: None)
    elif kind == "forward":
        fc.forward = lambda x: x  # type: ignore[method-assign]
    net, told = (
        nn.Sequential(fc, nn.LayerNorm(2)),
        {"hook": "has hooks", "forward": "has its own forward", "lazy": "lazy"},
    )

    class Fresh(ScalarNorm):
        def change(self, surgeon: Any) -> None:
            super().change(surgeon)
            surgeon.swap(lambda path, m: path == "0", lambda m: nn.Linear(2, 2), what="a map")

    with pytest.raises(
        ValueError, match=rf"Fresh: 0 \(.*\) .*{told.get(kind, 'is parametrized')}.*replacement would not have"
    ):
        eff.apply(net, Fresh())
    assert net[0] is fc and type(net[1]) is nn.LayerNorm and not applied(net), "the first swap was not put back"


def test_a_fold_that_lies_is_found_out() -> None:
    class Other(Halved):
        def fold(self) -> dict[str, Tensor]:
            return {"weight": torch.ones(3)}

    class Refuses(Halved):
        def fold(self) -> dict[str, Tensor]:
            raise CannotFold("it is Tuesday")

    for cls, error, message in (
        (Other, TypeError, "Other.fold returned .* at norm; expected the tensors of LayerNorm"),
        (Refuses, ValueError, "norm: it is Tues"),
    ):

        class Swaps(ScalarNorm):
            def change(self, surgeon: Any, cls: Any = cls) -> None:
                surgeon.swap(lambda path, m: isinstance(m, nn.LayerNorm), cls, what="a LayerNorm")

        with pytest.raises(error, match=message):
            eff.export(eff.apply(nn.ModuleDict({"norm": nn.LayerNorm(3)}), Swaps()))


def test_an_argument_without_its_attribute_is_an_error() -> None:
    class Forgets(ScalarNorm):
        def __init__(self, *, eps: float = 1.0) -> None:
            pass

    with pytest.raises(TypeError, match="Forgets has an argument 'eps' but no attribute of that name"):
        eff.apply(build("tiny_gpt"), Forgets())


# -- in a run


def test_optimizer_groups_listed_by_name() -> None:
    class ByName(TinyClassifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            slow = [{"params": [self.head[1].weight, self.head[1].bias], "lr": 1e-3}]
            return torch.optim.SGD(
                [{"params": [p for n, p in self.named_parameters() if "weight" in n and "head" not in n]}, *slow], 0.1
            )

    net = ByName()
    t = train(net, "classifier", LowRankAdapter())
    fast, slow = ([*group["params"]] for group in t.optimizers[0].param_groups)
    assert {id(p) for p in slow} >= {id(net.head[1].up), id(net.head[1].down)}
    assert {id(b[0].up) for b in net.blocks} <= {id(p) for p in fast}  # pyright: ignore[reportIndexIssue]
    assert all(float(b[0].up.detach().abs().max()) > 0 for b in net.blocks)  # pyright: ignore[reportIndexIssue]

    class HeadOnly(TinyClassifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.head.parameters(), 0.1)

    with pytest.raises(ValueError, match=r"blocks.0.0.down, blocks.0.0.up would not be trained, because no optimizer"):
        train(HeadOnly(), "classifier", LowRankAdapter())

    class MakesState(TinyClassifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adagrad([self.head[1].weight, *self.blocks.parameters()], 0.1)

    with pytest.raises(ValueError, match=r"head.1.down, head.1.up would not be trained: Adagrad got"):
        train(MakesState(), "classifier", LowRankAdapter())


def test_a_run_that_never_trained_leaves_the_plain_module() -> None:
    net = build("classifier")
    before, required = {path: id(m) for path, m in net.named_modules()}, [p.requires_grad for p in net.parameters()]
    with pytest.raises(ValueError, match="stage 0 needs 9 blocks"):  # once the module is changed
        train(net, "classifier", LowRankAdapter(), eff.ProgressiveStacking(stages=[(0.0, 9)]))
    trainer(LowRankAdapter(), limit_val_batches=1).validate(net, loader("classifier"), verbose=False)
    assert {path: id(m) for path, m in net.named_modules()} == before and not applied(net)
    assert [p.requires_grad for p in net.parameters()] == required
    assert "configure_model" not in net.__dict__ and "configure_optimizers" not in net.__dict__


def test_checkpoints_name_what_was_applied_and_loads_say_what_is_missing(tmp_path: Path) -> None:
    net, t = fit("tiny_gpt", lambda: [LowRankAdapter(names=["qkv"])], directory=tmp_path, max_steps=2)
    path = checkpoints(tmp_path)[-1]
    (entry,) = torch.load(path, weights_only=True)["lightning_eff"]["architecture"]
    assert entry == described(net)[0] and entry["settings"] == {"rank": 2, "alpha": 4.0, "names": ["qkv"]}
    with pytest.raises(
        ValueError, match=r"changed by LowRankAdapter\(rank=2.*this module was changed by LowRankAdapter\(rank=3"
    ):
        fit("tiny_gpt", lambda: [LowRankAdapter(rank=3, names=["qkv"])], resume=path)
    with pytest.raises(
        ValueError, match=r"changed by LowRankAdapter\(.*, but this module was changed by none. Add the same techniques"
    ):
        fit("tiny_gpt", lambda: [eff.ExactResume()], resume=path)
    with pytest.raises(RuntimeError, match=r"blocks.0.qkv.down"):
        TinyGPT.load_from_checkpoint(path)
    fit("tiny_gpt", lambda: [eff.ExactResume()], directory=tmp_path / "plain", max_steps=2)
    with pytest.raises(
        ValueError, match="The checkpoint is of the plain module, but this module was changed by LowRankAdapter"
    ):
        fit("tiny_gpt", lambda: [LowRankAdapter()], resume=checkpoints(tmp_path / "plain")[-1])
    fresh = build("tiny_gpt")
    t = trainer(LowRankAdapter(names=["qkv"]), limit_val_batches=2)
    (by_trainer,) = t.validate(fresh, loader("tiny_gpt", shuffle=False), ckpt_path=path, verbose=False)
    assert torch.equal(flat(fresh), flat(net)) and by_trainer["val_loss"] > 0, "it keeps what was loaded into it"


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
def test_beside_copies_of_the_module() -> None:
    net = build("classifier")
    train(net, "classifier", LowRankAdapter(), EMAWeightAveraging(decay=0.5))
    assert flat(eff.export(net)).isfinite().all()
    with pytest.raises(ValueError, match=r"EMAWeightAveraging precedes it .* Move EMAWeightAveraging to the end"):
        train(build("classifier"), "classifier", EMAWeightAveraging(decay=0.5), LowRankAdapter())
    with pytest.raises(ValueError, match=r"StochasticWeightAveraging copies the module at setup.*Use lightning_eff's"):
        train(build("classifier"), "classifier", LowRankAdapter(), StochasticWeightAveraging(0.1))


def test_export_in_mid_run_is_refused() -> None:
    class Exports(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            eff.export(pl_module)

    with pytest.raises(ValueError, match=r"TinyClassifier is being trained. Call export after the fit"):
        train(build("classifier"), "classifier", LowRankAdapter(), Exports())
