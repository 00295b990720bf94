"""SparseUpcycling against loops over tokens and experts; how it starts, which tokens compete, and what is refused."""

import copy
import math
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff import SparseUpcycling
from lightning_eff.model.layers._experts import finding
from lightning_eff.model.layers._experts.module import ExpertLinear, Seen, dispatches
from lightning_eff.model.layers._experts.routing import balance_loss, loads, places
from lightning_eff.model.layers.sparse_upcycling import chosen_blocks
from tests.cases import Case, classifier
from tests.model.attention.nets import Net, Own
from tests.model.shortcuts.nets import Recomputed, again, alike, gradients, loss_of, net, plainly, reentrantly, tokens
from tests.models import VOCAB, TinyGPT, flat, loader, make_batch, module, trainer

CASES = {
    "SparseUpcycling": Case(
        active=lambda: SparseUpcycling(4),
        neutral=lambda: SparseUpcycling(1),
        architecture=True,
        stays="its experts are several feed-forward networks",
        refuses={"classifier": "found no residual branch"},
        lost=(classifier, "classifier", "found no residual branch"),
    )
}

Weights = dict[tuple[int, int], Tensor]  # by token and expert


def best(values: Tensor, count: int) -> list[int]:
    """The indices of the largest of some values."""
    plain = values.tolist()
    return sorted(range(len(plain)), key=lambda i: -plain[i])[:count]


def by_experts(p: Tensor, choices: int) -> Weights:
    """Expert Choice for the probabilities of one sequence, (T, E)."""
    count, number = p.shape
    room = min(count, math.ceil(choices * count / number))
    return {(t, e): p[t, e] for e in range(number) for t in best(p[:, e], room)}


def by_tokens(p: Tensor, choices: int, capacity: float) -> Weights:
    """Token choice: experts serve tokens in their order."""
    count, number = p.shape
    room = min(count, math.ceil(capacity * choices * count / number))
    held, found = [0] * number, Weights()
    for t in range(count):
        for e in best(p[t], choices):
            held[e] += 1
            if held[e] <= room:
                found[t, e] = p[t, e]
    return found


def switch(p: Tensor, choices: int) -> Tensor:
    """The balance loss of a batch (B, T, E), by loops: N sum_i f_i P_i."""
    every = p.flatten(0, 1)
    count, number = every.shape
    total = torch.zeros((), dtype=p.dtype)
    for i in range(number):
        f = sum(i in best(row, choices) for row in every) / count
        total = total + f * every[:, i].sum() / count
    return number * total


class Mixed(nn.Module):
    """A feed-forward network with experts, one token and expert after the other.

    Args:
        mlp: the upcycled network, whose parameters it has.
        by: which of both rules.
    """

    def __init__(self, mlp: Any, by: str, choices: int, capacity: float, normalize: bool) -> None:
        super().__init__()
        self.mlp, self.by, self.choices, self.capacity, self.normalize = mlp, by, choices, capacity, normalize
        self.balance = torch.zeros(())
        self.dropped: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.mlp[0], self.mlp[2]
        p = torch.softmax(x @ up.router.T, -1)
        self.balance = switch(p, self.choices)
        samples: list[Tensor] = []
        for rows, of in zip(x, p, strict=True):
            weights = (
                by_experts(of, self.choices) if self.by == "experts" else by_tokens(of, self.choices, self.capacity)
            )
            outputs: list[Tensor] = []
            for t, row in enumerate(rows):
                mine = {e: w for (at, e), w in weights.items() if at == t}
                self.dropped.append(not mine)
                total = sum(mine.values()) if self.normalize else 1.0
                y = torch.zeros_like(row)
                for e, w in mine.items():
                    h = F.gelu(up.expert_weight[e] @ row + up.expert_bias.view(len(up.router), -1)[e])
                    y = y + w / total * (down.expert_weight[e] @ h + down.expert_bias.view(len(up.router), -1)[e])
                outputs.append(y)
            samples.append(torch.stack(outputs))
        return torch.stack(samples)


def stir(m: nn.Module, size: float = 1.0) -> None:
    """Let experts differ, and routers have preferences."""
    g = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if "router" in name:
                p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype) * size)
            elif "expert_" in name:
                p.add_(torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.3)


class Block(nn.Module):
    """A block that sees all tokens."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.norm1, self.norm2, self.qkv, self.proj, self.mlp = (
            plain.norm1,
            plain.norm2,
            plain.qkv,
            plain.proj,
            plain.mlp,
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.proj(torch.softmax(q @ k.mT / 4.0, -1) @ v)
        return x + self.mlp(self.norm2(x))


def watch(m: nn.Module) -> list[Seen]:
    """The records of all later calls."""
    found: list[Seen] = []
    for dispatch in dispatches(m).values():
        dispatch.seen = found
    return found


def network(by: str) -> Any:
    """A language model in float64 whose blocks are causal where tokens choose."""
    made = net(4)
    if by == "experts":
        made.blocks = nn.ModuleList(Block(block) for block in made.blocks or ())
    return made


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("by", "experts", "choices", "capacity"),
    [("experts", 4, 2, 1.25), ("experts", 3, 1, 1.25), ("tokens", 4, 2, 1.0), ("tokens", 5, 3, 1.25)],
)
def test_the_rule_is_that_of_a_loop(by: str, experts: int, choices: int, capacity: float, normalize: bool) -> None:
    settings: dict[str, Any] = {"choices": choices, "capacity": capacity, "normalize": normalize}
    ours = eff.apply(network(by), SparseUpcycling(experts, **settings))
    assert [*dispatches(ours)] == ["blocks.1.mlp.0", "blocks.3.mlp.0"]
    assert {d.by for d in dispatches(ours).values()} == {by}
    stir(ours)
    found = gradients(ours, loss_of(ours, tokens()))
    theirs = copy.deepcopy(ours)
    mixed = [Mixed(theirs.blocks[i].mlp, by, choices, capacity, normalize) for i in (1, 3)]
    theirs.blocks[1].mlp, theirs.blocks[3].mlp = mixed
    expected = gradients(theirs, loss_of(theirs, tokens()))
    alike(found, {name.replace(".mlp.mlp.", ".mlp."): t for name, t in expected.items()})
    assert any(found[f"blocks.1.mlp.{i}.expert_weight"].abs().amax((1, 2)).min() > 0 for i in (0, 2))
    assert float(found["blocks.1.mlp.0.router"].abs().max()) > 0
    seen = watch(ours)
    loss_of(ours, tokens())
    for record, one in zip(seen, mixed, strict=True):
        assert float(record.dropped) == pytest.approx(sum(one.dropped) / len(one.dropped))
        assert (record.balance is None) == (by == "experts")
        if record.balance is not None:
            torch.testing.assert_close(record.balance, one.balance)
    assert by == "tokens" or choices > 1 or any(float(record.dropped) > 0 for record in seen)


@pytest.mark.parametrize("choices", [1, 2])
def test_the_balance_loss_is_that_of_switch_transformers(choices: int) -> None:
    g = torch.Generator().manual_seed(0)
    p = torch.randn(2, 7, 4, generator=g, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(balance_loss(p, loads(p.topk(choices).indices, 4)), switch(p, choices))
    even, spread = torch.full((1, 4, 4), 0.25), torch.arange(4).view(1, 4, 1)
    assert float(balance_loss(even, loads(spread, 4))) == pytest.approx(1.0)  # its least value for one choice
    alone = torch.eye(4)[:1].expand(1, 4, 4)
    assert float(balance_loss(alone, loads(spread * 0, 4))) == pytest.approx(4.0)


def test_places_are_as_many_as_the_paper_says() -> None:
    assert [places(n, 8, 2.0) for n in (197, 32, 3, 1)] == [50, 8, 1, 1]
    assert places(4, 2, 3.0) == 4 and places(10, 10, 1.1) == 2 and places(25, 5, 0.6000000000000001) == 3
    assert chosen_blocks(5, "alternate") == [1, 3] and chosen_blocks(12, "alternate") == [1, 3, 5, 7, 9, 11]
    assert chosen_blocks(5, "last") == [3, 4] and chosen_blocks(12, "last") == [*range(6, 12)]


KINDS = {
    "gpt2": {"tokens"},
    "llama": {"tokens"},
    "bert": {"experts"},
    "vit": {"experts"},
    "videomae": {"experts"},
    "t5": {"experts", "tokens"},
}


@pytest.mark.parametrize("name", KINDS)
def test_it_starts_as_the_dense_module_where_no_token_is_dropped(name: str) -> None:
    plain: Any = module(name).eval()
    batch = make_batch(name, 2)
    ours = eff.apply(copy.deepcopy(plain), SparseUpcycling(4, choices=4, capacity=1.0))
    assert {d.by for d in dispatches(ours).values()} == KINDS[name]
    torch.testing.assert_close(ours.training_step(batch, 0), plain.training_step(batch, 0), rtol=1e-5, atol=1e-6)
    weights = [m.expert_weight for m in ours.modules() if isinstance(m, ExpertLinear)]
    assert weights and all(torch.equal(w[0], one) for w in weights for one in w)
    routers = torch.cat([p.detach().flatten() for n, p in ours.named_parameters() if "router" in n])
    assert float(routers.std()) == pytest.approx(0.02, rel=0.2) and float(routers.mean().abs()) < 0.005
    if KINDS[name] == {"tokens"}:  # no expert can have more than all tokens
        roomy = eff.apply(copy.deepcopy(plain), SparseUpcycling(4, choices=2, capacity=2.0))
        torch.testing.assert_close(roomy.training_step(batch, 0), plain.training_step(batch, 0), rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("by", ["experts", "tokens"])
def test_other_samples_and_later_tokens_change_nothing_they_must_not(by: str) -> None:
    ours = eff.apply(network(by), SparseUpcycling(4, choices=1, normalize=False, capacity=1.0))
    stir(ours, 3.0)
    ids, _ = tokens()
    whole = ours(ids)
    seen = watch(ours)
    other = ours(torch.stack([ids[0], ids[1].flip(0)]))
    assert float(torch.stack([one.dropped for one in seen]).max()) > 0
    assert torch.equal(other[0], whole[0]) and not torch.equal(other[1], whole[1])
    late = ids.clone()
    late[:, 5:] = (late[:, 5:] + 1) % VOCAB
    moved = (ours(late) - whole).abs()
    assert float(moved[:, 5:].max()) > 1e-3
    assert (float(moved[:, :5].max()) < 1e-12) == (by == "tokens")


class SecondSamples(Net):
    """Its hidden states are (T, B, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0), 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids.T)).transpose(0, 1))


def test_torchs_encoder_layers_route_in_evaluation_too_with_samples_in_either_dimension() -> None:
    """A fused kernel would read the layers' weights instead of calling them."""
    ids = tokens()[0]
    torch.manual_seed(0)
    first, second = Net("encoder").eval(), SecondSamples().eval()
    second.load_state_dict(first.state_dict())
    found: list[Tensor] = []
    for one in (first, second):
        ours = eff.apply(one, SparseUpcycling(4, choices=1))
        stir(ours)
        with torch.no_grad():
            found.append(ours(ids))
        torch.testing.assert_close(found[-1], ours(ids))
    torch.testing.assert_close(found[0], found[1])
    assert {d._settings[-1] for d in dispatches(second).values()} == {1}


def test_recomputed_blocks_route_again() -> None:
    found: list[Any] = []
    for call in (plainly, again):
        pl.seed_everything(0, verbose=False)
        found.append(Recomputed(call))
        trainer(SparseUpcycling(4, balance=0.1), max_steps=3).fit(found[-1], loader("tiny_gpt"))
    for name, p in found[0].named_parameters():
        assert torch.equal(p, found[1].get_parameter(name)), name


def in_training(block: nn.Module, x: Tensor) -> Tensor:
    return reentrantly(block, x) if block.training else block(x)


def test_blocks_that_are_recomputed_reentrantly_are_refused() -> None:
    """Under Hugging Face's checkpointing, only the first step shows it."""
    with pytest.raises(ValueError, match="ran only in parts on made-up inputs"):
        eff.apply(Recomputed(reentrantly), SparseUpcycling(4))
    with pytest.raises(ValueError, match=r"ran without a graph, .* use_reentrant=True"):
        trainer(SparseUpcycling(4), max_steps=1).fit(Recomputed(in_training), loader("tiny_gpt"))
    trainer(SparseUpcycling(4, balance=0), max_steps=1).fit(Recomputed(in_training), loader("tiny_gpt"))


class Padded(Net):
    """Its encoder knows which tokens are padding."""

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.blocks(self.embed(ids), src_key_padding_mask=padding))


def test_torchs_encoder_gets_no_nested_tensors_in_evaluation() -> None:
    """It would make them of padded texts for its fused kernel, and nothing else accepts them."""
    plain = Padded("encoder").eval()
    before = {name: copy.copy(vars(m)) for name, m in plain.named_modules()}
    ours = eff.apply(plain, SparseUpcycling(4, choices=4))
    ids, padding = tokens()[0], torch.arange(9).expand(2, 9) >= torch.tensor([[9], [6]])
    expected = ours(ids, padding)
    with torch.no_grad():
        found = ours(ids, padding)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1, :6], expected[1, :6])
    assert vars(plain.blocks)["use_nested_tensor"] is True and vars(plain.blocks).keys() == before["blocks"].keys()


class Total(TinyGPT):
    """Keeps the loss of its step, and the one that is trained."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.own = super().training_step(batch, batch_idx)
        return {"loss": self.own, "more": 1}

    def on_before_backward(self, loss: Tensor) -> None:
        self.total = loss.detach().clone()


def test_the_balance_loss_is_added_to_the_loss_and_reported() -> None:
    found: dict[float, tuple[Any, Any]] = {}
    for balance in (0.0, 0.5):
        pl.seed_everything(0, verbose=False)
        technique, net = SparseUpcycling(4, balance=balance), Total(4, dropout=0.0)
        trainer(technique, max_steps=1).fit(net, loader("tiny_gpt"))
        found[balance] = net, technique.report()
    net, report = found[0.5]
    assert {*report} == {"networks", "dropped", "load", "balance"} and report["networks"] == 2
    torch.testing.assert_close(net.total - net.own.detach(), 0.5 * 2 * report["balance"])
    assert 2.0 <= float(report["balance"]) < 2.5 and float(report["load"]) >= 1.0
    assert torch.equal(found[0.0][0].total, found[0.0][0].own) and torch.equal(found[0.0][0].own, net.own)
    technique = SparseUpcycling(4)
    trainer(technique, max_steps=1).fit(module("vit"), loader("vit"))
    assert technique.report()["load"] == 1.0 and "balance" not in technique.report()


class MaskedByBatch(Net):
    """Its blocks are causal where the batch says so."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks.layers:  # pyright: ignore[reportGeneralTypeIssues, reportAttributeAccessIssue]
            x = block(x, src_mask=mask)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        length = batch["input_ids"].shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if len(batch) > 2 else None
        return F.cross_entropy(self(batch["input_ids"], mask).flatten(0, 1), batch["labels"].flatten())


def test_blocks_that_are_causal_only_in_training_are_refused_before_a_step() -> None:
    batch = make_batch("tiny_gpt")
    causal = DataLoader(cast(Any, [{**batch, "causal": torch.ones(1)}]), batch_size=None)
    trainer(SparseUpcycling(4), max_steps=1).fit(
        MaskedByBatch("encoder"), DataLoader(cast(Any, [batch]), batch_size=None)
    )
    net = MaskedByBatch("encoder")
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r"blocks\.layers\.1 is causal in the first batch, .* Set routing='tokens'"):
        trainer(SparseUpcycling(4), max_steps=1).fit(net, causal)
    assert all(torch.equal(net.state_dict()[name], t) for name, t in before.items() if name in net.state_dict())
    trainer(SparseUpcycling(4, routing="tokens"), max_steps=1).fit(MaskedByBatch("encoder"), causal)


class MaskedLater(MaskedByBatch):
    """Its mask, which blocks always get, hides later tokens from the third batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        length = batch["input_ids"].shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) * (batch_idx >= 2)
        mask = mask.nan_to_num(nan=0.0)
        return F.cross_entropy(self(batch["input_ids"], mask).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize(("by", "at"), [("arguments", 3), ("values", 4)])
def test_blocks_that_become_causal_later_are_refused_then(by: str, at: int) -> None:
    """Before the step if they get other kinds of arguments, and at the next look, at the 4th batch, otherwise."""
    batch = make_batch("tiny_gpt")
    later = {**batch, "causal": torch.ones(1)} if by == "arguments" else batch
    net = MaskedByBatch("encoder") if by == "arguments" else MaskedLater("encoder")
    weights: list[Tensor] = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            weights.append(flat(pl_module).clone())

    data = DataLoader(cast(Any, [batch, batch, later, later, later]), batch_size=None)
    with pytest.raises(
        ValueError, match=rf"blocks\.layers\.1 is causal in batch {at} of this training, .* Set routing="
    ):
        trainer(SparseUpcycling(4), Keep(), max_epochs=1).fit(net, data)
    assert len(weights) == at - 1 and torch.equal(flat(net), weights[-1])
    assert not net.get_submodule("blocks.layers.1")._forward_hooks


def test_only_steps_with_other_kinds_of_arguments_and_growing_intervals_cost_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    look = finding.sight
    monkeypatch.setattr(finding, "sight", lambda *call: looks.append(1) or look(*call))
    batch = make_batch("tiny_gpt")
    longer = make_batch("tiny_gpt", length=8)
    data = DataLoader(cast(Any, [batch, longer] * 8), batch_size=None)
    found: list[int] = []

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            found.append(len(looks))
            looks.clear()

    trainer(SparseUpcycling(4), Count(), max_epochs=1).fit(MaskedByBatch("encoder"), data)
    blocks = 1  # of two, the second has experts
    assert found[1:] == [blocks if i in (2, 4, 8, 16) else 0 for i in range(2, 17)]


class Shaped(Own):
    """Its feed-forward network reads how many tokens there are."""

    def __init__(self, kind: str) -> None:
        super().__init__("causal")
        self.how = kind
        self.up, self.down, self.other = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        batch, length, _ = x.shape
        if self.how == "turned":
            return x + self.down(F.gelu(self.up(self.other(x).transpose(0, 1)))).transpose(0, 1)
        h = self.up(self.other(x))
        if self.how == "view":
            return x + self.down(F.gelu(h).view(batch * length, -1)).view(batch, length, -1)
        if self.how == "weights":
            return x + F.linear(F.gelu(h), self.down.weight, self.down.bias)
        return x + self.down(F.gelu(h) * torch.arange(length).view(-1, 1))


class OfShaped(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Shaped(kind), Shaped(kind))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("view", "does not compute with experts in its feed-forward networks"),
        ("turned", r"input \(8, 2, 16\) has the 2 samples of blocks.0 in another dimension"),
        ("weights", "not seen to be called as modules"),
        ("position", "does not compute with experts in its feed-forward networks"),
    ],
)
def test_code_between_the_layers_that_needs_all_tokens_is_refused(kind: str, message: str) -> None:
    net = OfShaped(kind)
    before = [type(m) for m in net.modules()]
    with pytest.raises(ValueError, match=message):
        eff.apply(net, SparseUpcycling(4))
    assert [type(m) for m in net.modules()] == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": 2, "choices": 3}, r"SparseUpcycling\(experts=2, choices=3\): .* Give choices=2"),
        ({"routing": "experts"}, r"the block blocks\.1 is causal .* Set routing='tokens'"),
        ({"choices": 1}, r"choices=1, normalize=True\): where tokens choose, .* no gradient"),
        ({"blocks": [1, 7]}, r"blocks=\(1, 7\)\): block 7 has no .* expected indices from \[0, 1, 2, 3, 4\]"),
        ({"blocks": "every"}, r"SparseUpcycling\(blocks='every'\)"),
        ({"capacity": 0.5}, r"SparseUpcycling\(capacity=0.5\)"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eff.apply(net(), SparseUpcycling(**settings))


def test_a_checkpoint_of_the_dense_run_is_refused_with_the_way_to_start_from_it(tmp_path: Any) -> None:
    t = trainer(max_steps=1)
    t.fit(module("tiny_gpt"), loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "dense.ckpt")
    with pytest.raises(ValueError, match=r"of the plain module, .* start a fit without ckpt_path"):
        trainer(SparseUpcycling(4), max_steps=2).fit(
            module("tiny_gpt"), loader("tiny_gpt"), ckpt_path=tmp_path / "dense.ckpt"
        )
    plain = module("tiny_gpt")
    plain.load_state_dict(torch.load(tmp_path / "dense.ckpt", weights_only=True)["state_dict"])
    start = plain.get_parameter("blocks.1.mlp.0.weight").detach().clone()
    net = eff.apply(plain, SparseUpcycling(4))
    assert torch.equal(dict(net.named_parameters())["blocks.1.mlp.0.expert_weight"][3], start)


def test_networks_that_are_zero_at_first_route_as_trained_ones_do() -> None:
    """A resumed run finds the routing on new weights, and would otherwise see no token there."""
    net = TinyGPT(4)
    with torch.no_grad():
        for block in net.blocks or ():
            for name in ("proj.weight", "mlp.2.weight"):
                block.get_parameter(name).zero_()
    state = copy.deepcopy(net.state_dict())
    ours = eff.apply(net, SparseUpcycling(4))
    assert {d.by for d in dispatches(ours).values()} == {"tokens"}
    assert all(torch.equal(t, state[name]) for name, t in ours.state_dict().items() if name in state)


class Grouped(TinyGPT):
    """Its optimizer has no weight decay for biases and norms, which it tells by their dimensions."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        flat = [p for p in self.parameters() if p.ndim < 2]
        return torch.optim.AdamW(
            [{"params": [p for p in self.parameters() if p.ndim > 1]}, {"params": flat, "weight_decay": 0.0}],
            lr=self.lr,
        )


class Start(pl.Callback):
    """Keeps the optimizer's states at the start."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        states = trainer.optimizers[0].state
        self.states = {name: copy.deepcopy(dict(states[p])) for name, p in pl_module.named_parameters() if p in states}


def test_states_of_the_dense_run_go_to_each_expert(tmp_path: Any) -> None:
    dense, path = Grouped(4), tmp_path / "dense.ckpt"
    t = trainer(max_steps=3)
    t.fit(dense, loader("tiny_gpt"))
    t.save_checkpoint(path)
    old = {name: t.optimizers[0].state[p] for name, p in dense.named_parameters()}
    start, net = Start(), Grouped(4)
    net.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    technique = SparseUpcycling(4, states=str(path))
    t = trainer(technique, start, max_steps=2)
    t.fit(net, loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "mixture.ckpt")
    routers = {name for name, _ in net.named_parameters() if name.endswith("router")}
    assert len(routers) == 2 and start.states.keys() == {n for n, _ in net.named_parameters()} - routers
    for name, state in start.states.items():
        plain = old[name.replace("expert_", "")]
        assert state["step"] == 3 and state.keys() == plain.keys()
        for key in ("exp_avg", "exp_avg_sq"):
            copies = state[key].view(-1, *plain[key].shape)
            assert len(copies) == (4 if "expert_" in name else 1) and all(
                torch.equal(one, plain[key]) for one in copies
            )
    decays = {id(p): g["weight_decay"] for g in t.optimizers[0].param_groups for p in g["params"]}
    assert all((decays[id(p)] == 0) == (p.ndim == 1) for p in net.parameters())
    path.unlink()
    again = trainer(SparseUpcycling(4, states=str(path)), start, max_steps=3)  # a resumed run has its own
    again.fit(Grouped(4), loader("tiny_gpt"), ckpt_path=tmp_path / "mixture.ckpt")
    assert start.states["blocks.1.mlp.0.router"]["step"] == 2
    with pytest.raises(ValueError, match=r"states='.*dense.ckpt'\): there is no such file"):
        trainer(technique, max_steps=3).fit(Grouped(4), loader("tiny_gpt"))


def test_states_of_other_optimizers_are_refused(tmp_path: Any) -> None:
    t = trainer(max_steps=1)
    t.fit(TinyGPT(4), loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match="has 1 groups of parameters there, and 2 here"):
        trainer(SparseUpcycling(4, states=str(tmp_path / "one.ckpt")), max_steps=1).fit(Grouped(4), loader("tiny_gpt"))
    with pytest.raises(ValueError, match=r"a group has \d+ parameters there, and \d+ without routers here"):
        trainer(SparseUpcycling(4, states=str(tmp_path / "one.ckpt")), max_steps=1).fit(TinyGPT(6), loader("tiny_gpt"))
    with pytest.raises(ValueError, match=r"the state exp_avg \(.*\) does not belong to embed.weight"):
        trainer(SparseUpcycling(4, states=str(tmp_path / "one.ckpt")), max_steps=1).fit(
            TinyGPT(4, dim=32), loader("tiny_gpt")
        )
