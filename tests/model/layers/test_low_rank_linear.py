"""Linear maps in two factors: the nearest ones of their rank, exact at full rank, smaller, and folded away by export."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import LowRankLinear
from lightning_eff.model.layers._low_rank.factored import FactoredLinear
from lightning_eff.model.layers._low_rank.factors import decomposition, energy_of_rank, factors, rank_of_energy
from tests import families
from tests.cases import Case, no_map
from tests.families import Losses
from tests.models import TinyGPT, loader, make_batch, trainer
from tests.runs import fit, fit_yaml

CASES = {
    "LowRankLinear": Case(
        active=lambda: LowRankLinear(rank=0.4, min_features=8),
        neutral=lambda: LowRankLinear(names=[]),
        architecture=True,
        on_classifier=lambda: LowRankLinear(rank=0.4, min_features=4),
        lost=(no_map, "classifier", "has no linear layer to act on"),
    )
}
FAMILIES = ("gpt2", "qwen3", "modernbert", "vit", "resnet")


def logits(net: Any, name: str) -> Tensor:
    with torch.no_grad():
        found = net.eval().model(**families.batch(name, 2))
    return getattr(found, "logits", found.loss)


# -- the rule


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (9, 9)])
def test_no_product_of_the_rank_is_nearer(shape: tuple[int, int]) -> None:
    """Against the eigenvectors of W^T W: what is left over is the sum of the smallest eigenvalues (Eckart & Young)."""
    torch.manual_seed(0)
    w = torch.randn(*shape, dtype=torch.float64)
    eigenvalues = torch.linalg.eigvalsh(w.T @ w).clamp(min=0).flip(0)
    u, s, vh = decomposition(w)
    for rank in range(1, min(shape) + 1):
        a, b = factors(u, s, vh, rank)
        assert a.shape == (shape[0], rank) and b.shape == (rank, shape[1])
        torch.testing.assert_close((w - a @ b).square().sum(), eigenvalues[rank:].sum())
        torch.testing.assert_close(a.T @ a, b @ b.T)  # evenly: both have the singular values' roots
        torch.testing.assert_close((a.T @ a).diagonal(), s[:rank])
    torch.testing.assert_close(a @ b, w)


def test_the_rank_that_keeps_a_share_of_the_energy() -> None:
    s = torch.tensor([4.0, 2.0, 2.0, 1.0, 0.0])  # squares 16, 4, 4, 1, 0 of 25
    expected = {0.01: 1, 0.64: 1, 0.65: 2, 0.8: 2, 0.81: 3, 0.96: 3, 0.97: 4, 1.0: 4}
    assert {share: rank_of_energy(s, share) for share in expected} == expected
    assert [energy_of_rank(s, r) for r in range(1, 6)] == pytest.approx([0.64, 0.8, 0.96, 1.0, 1.0])
    assert rank_of_energy(torch.zeros(3), 0.9) == 1 and energy_of_rank(torch.zeros(3), 1) == 1.0
    assert rank_of_energy(torch.ones(10), 1.0) == 10


# -- modules


@pytest.mark.parametrize("name", FAMILIES)
def test_at_full_rank_every_model_computes_what_it_did(name: str) -> None:
    plain = families.module(name)
    names = {"gpt2": ["h.*"], "modernbert": ["layers.*"]}.get(name, ["*"])  # in these two, the head is tied
    net = eff.apply(copy.deepcopy(plain), LowRankLinear(rank=1.0, names=names))
    made = {path for path, m in net.named_modules() if isinstance(m, FactoredLinear)}
    maps = {path for path, m in plain.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    assert made and {path for path in maps - made if not ("head" in path or "decoder" in path)} == set()
    torch.testing.assert_close(logits(net, name), logits(plain, name), rtol=1e-4, atol=1e-4)
    exported = eff.export(net)
    assert exported.state_dict().keys() == plain.state_dict().keys()
    for key, value in exported.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "modernbert", "vit"])
def test_in_blocks_maps_become_the_nearest_of_their_rank_and_fold_away(name: str) -> None:
    plain = families.module(name)
    net = eff.apply(copy.deepcopy(plain), LowRankLinear(rank=6, min_features=8))
    made = {path: m for path, m in net.named_modules() if isinstance(m, FactoredLinear)}
    assert made and not any("head" in path or "classifier" in path or "embed" in path for path in made)
    for path, m in made.items():
        w = plain.get_submodule(path).weight
        assert isinstance(w, Tensor) and m.rank == 6 and m.weight.shape == w.shape
        tail = torch.linalg.svdvals(w.double())[6:].square().sum()
        torch.testing.assert_close((w - m.weight).double().square().sum(), tail, rtol=1e-3, atol=1e-9)
        assert sum(p.numel() for p in (m.first.weight, m.second.weight)) == 6 * (m.in_features + m.out_features)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    torch.testing.assert_close(logits(eff.export(net), name), logits(net, name), rtol=1e-4, atol=1e-5)


def test_the_products_are_really_smaller() -> None:
    """By torch's own counter: r (N + K) for N K, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(net: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            net(torch.randn(5, 64)).sum().backward()
        return counter.get_total_flops()

    plain = nn.Sequential(nn.Tanh(), nn.Linear(64, 96))
    made = eff.apply(copy.deepcopy(plain), LowRankLinear(rank=8, names=["1"]))
    assert flops(plain) == 2 * 2 * 5 * 64 * 96  # the product, and the weight's gradient
    assert flops(made) == 2 * 5 * 8 * (2 * 64 + 3 * 96)  # inputs of the first factor take no gradient


def test_maps_are_those_of_the_blocks_and_what_is_left_is_told(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        net = eff.apply(TinyGPT(2, dim=32), LowRankLinear(rank=0.25, min_features=32))
    made = [path for path, m in net.named_modules() if isinstance(m, FactoredLinear)]
    assert made == [f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "proj", "mlp.0", "mlp.2")]
    assert "head (32 to 61) (it is outside the blocks)" in caplog.text
    assert "replaced 8 linear layers with factors of rank 8 to 8" in caplog.text
    assert f"{2 * 8 * (128 + 64 + 160 + 160):,} weights instead of {2 * 12 * 32 * 32:,}" in caplog.text


def test_maps_that_two_would_not_make_smaller_are_left_unless_named() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 64))
    made = eff.apply(copy.deepcopy(net), LowRankLinear(rank=8, min_features=1))  # 8 * 32 = 16 * 16
    assert type(made[0]) is nn.Linear and isinstance(made[2], FactoredLinear)
    made = eff.apply(copy.deepcopy(net), LowRankLinear(rank=8, names=["0"]))
    assert isinstance(made[0], FactoredLinear) and type(made[2]) is nn.Linear
    with pytest.raises(
        ValueError, match=r"found no linear layer in Sequential.*two factors of rank 16 have 512 weights.* has 256"
    ):
        eff.apply(net, LowRankLinear(rank=16, min_features=1))


class Reading(nn.Module):
    """It reads the weight of its map and its dtype, as some of Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.fc.weight.dtype), self.fc.weight, self.fc.bias) + self.fc(x)


def test_who_reads_the_weight_gets_the_product() -> None:
    plain = Reading()
    net, x = eff.apply(copy.deepcopy(plain), LowRankLinear(rank=1.0, names=["fc"])), torch.randn(3, 24)
    torch.testing.assert_close(net(x), plain(x))
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_layers_of_torch_that_read_weights_in_evaluation_are_right() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    plain = nn.Sequential(nn.Linear(16, 16), layer)
    net = eff.apply(copy.deepcopy(plain), LowRankLinear(rank=1.0, names=["linear*"]))
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"out_proj.*cannot be replaced: its weight is used by nn.MultiheadAttention"):
        eff.apply(plain, LowRankLinear(names=["*out_proj"]))


def test_dtypes_stay_and_weights_may_lie_nowhere() -> None:
    net = eff.apply(nn.Sequential(nn.Linear(32, 32)).to(torch.bfloat16), LowRankLinear(4, names=["0"]))
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16} == {p.dtype for p in eff.export(net).parameters()}
    on_meta = eff.apply(nn.Sequential(nn.Linear(32, 32)).to("meta"), LowRankLinear(4, names=["0"]))
    assert all(p.is_meta for p in on_meta.parameters())
    with pytest.raises(ValueError, match=r"0 is on the meta device.*Give rank= instead"):
        eff.apply(nn.Sequential(nn.Linear(32, 32)).to("meta"), LowRankLinear(energy=0.5, names=["0"]))


# -- runs


def test_a_step_moves_both_factors_and_the_loss_falls() -> None:
    net = TinyGPT(2, dim=32, dropout=0.0)
    technique = LowRankLinear(rank=0.25, min_features=16)
    losses = Losses()
    trainer(technique, losses, max_steps=60).fit(net, loader("tiny_gpt"))
    assert sum(losses.losses[-5:]) < 0.7 * sum(losses.losses[:5])
    assert technique.report()["factored"] == 8


def test_ranks_by_energy_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Another start has singular values of its own; what is loaded says which ranks there are."""

    def build(seed: int) -> TinyGPT:
        torch.manual_seed(seed)
        return TinyGPT(2, dim=32, dropout=0.0)

    def ranks(net: nn.Module) -> list[int]:
        return [m.rank for m in net.modules() if isinstance(m, FactoredLinear)]

    def technique() -> LowRankLinear:
        return LowRankLinear(energy=0.6, min_features=16)

    first, second = build(1), build(3)
    with torch.no_grad():
        second.blocks[0].qkv.weight[:24] *= 9  # pyright: ignore[reportOptionalSubscript, reportArgumentType, reportIndexIssue]
    t = trainer(technique(), max_steps=3, enable_checkpointing=False)
    t.fit(first, loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    other = eff.apply(copy.deepcopy(second), technique())
    assert ranks(other) != ranks(first) and len(set(ranks(first))) > 1
    other.load_state_dict(torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"])
    assert ranks(other) == ranks(first)
    x = make_batch("tiny_gpt")["input_ids"]
    assert torch.equal(other.eval()(x), first.eval()(x))
    again = trainer(technique(), max_steps=5)
    again.fit(second, loader("tiny_gpt"), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert ranks(second) == ranks(first) and again.global_step == 5
    state = again.optimizers[0].state
    assert all(state[p]["exp_avg"].shape == p.shape for p in second.parameters())


def test_by_energy_every_map_keeps_its_share() -> None:
    plain = families.module("vit")
    net = eff.apply(copy.deepcopy(plain), LowRankLinear(energy=0.7, min_features=8, names=["*"]))
    for path, m in net.named_modules():
        if isinstance(m, FactoredLinear):
            s = torch.linalg.svdvals(plain.get_submodule(path).weight.double()).square()  # pyright: ignore[reportCallIssue, reportArgumentType]
            share = s.cumsum(0) / s.sum()
            assert share[m.rank - 1] >= 0.7 - 1e-6 and (m.rank == 1 or share[m.rank - 2] < 0.7)


def test_tied_heads_stay_tied() -> None:
    net = eff.apply(families.module("gpt2"), LowRankLinear(rank=4, min_features=8))
    assert net.model.lm_head.weight is net.model.transformer.wte.weight
    with pytest.raises(ValueError, match="the weights would no longer be tied"):
        eff.apply(families.module("gpt2"), LowRankLinear(rank=4, names=["lm_head"]))


def test_two_processes_take_the_first_ones_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    technique, gathered = LowRankLinear(energy=0.6, names=["mlp.0"]), []

    class Two:
        """A session of two processes, of which the other is the first, and has rank 3 everywhere."""

        @property
        def replicas(self) -> Any:
            return self

        def everyone(self, value: dict[str, int]) -> list[dict[str, int]]:
            gathered.append(value)
            return [dict.fromkeys(value, 3), value]

    monkeypatch.setattr(technique, "_session", Two())
    net = eff.apply(TinyGPT(2), technique)
    assert [m.rank for m in net.modules() if isinstance(m, FactoredLinear)] == [3, 3] and len(gathered) == 1


# -- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"rank=0\): expected an integer >= 1 or a number in"),
        (
            {"rank": 1.5},
            r"rank=1.5\): expected an integer >= 1 or a number in \(0, 1\], or None: the rank of each layer",
        ),
        ({"rank": True}, "rank=True"),
        (
            {"energy": 0.0},
            r"energy=0.0\): expected a number in \(0, 1\], or None: the fraction of the sum of squared singular",
        ),
        ({"energy": 1.1}, "energy=1.1"),
        ({"rank": 4, "energy": 0.5}, "both set the rank. Give one of them"),
        (
            {"names": "mlp"},
            r"names='mlp'\): expected a list of dotted paths or patterns, or None: dotted paths of the linear layers",
        ),
        ({"min_features": 0}, r"min_features=0\): expected an integer >= 1"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowRankLinear(**settings)


def test_what_is_named_and_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(
        ValueError, match=r"rank=17\): the full rank of blocks.0.qkv \(Linear\) is 16.*Give rank=16 or less, or leave"
    ):
        eff.apply(TinyGPT(2), LowRankLinear(rank=17, names=["qkv"]))
    with pytest.raises(ValueError, match=r"no linear layer of TinyGPT is named 'qvk'; .*Nearest: .*qkv"):
        eff.apply(TinyGPT(2), LowRankLinear(rank=4, names=["qvk"]))
    reason = r"blocks.0.qkv \(16 to 48\), blocks.0.proj .* and 5 more: it has fewer features than min_features=512"
    with pytest.raises(
        ValueError, match=rf"no linear layer in TinyGPT.*{reason}.* Set min_features=16 or lower, or"
    ) as e:
        eff.apply(TinyGPT(2), LowRankLinear())
    assert str(e.value).count("it has fewer") == 1 and "smaller rank" not in str(e.value)
    with pytest.raises(ValueError, match=r"full rank is 16, below the rank of 20\. Give a smaller rank or energy, or"):
        eff.apply(TinyGPT(2), LowRankLinear(rank=20, min_features=16))
    assert len(eff.apply(TinyGPT(2), LowRankLinear(min_features=16)).state_dict()) > len(TinyGPT(2).state_dict())

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    with pytest.raises(
        ValueError, match=r"0 .8 to 8. cannot be replaced: a subclass of nn.Linear with its own forward"
    ):
        eff.apply(nn.Sequential(Own(8, 8)), LowRankLinear(names=["0"]))
    mixture = families.module("qwen3_moe")
    made = eff.apply(mixture, LowRankLinear(rank=4, min_features=8))
    assert not any("experts" in path for path, m in made.named_modules() if isinstance(m, FactoredLinear))


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "LowRankLinear", {"rank": 0.4, "min_features": 4}, keeps_state=False, max_steps=3)


def test_a_run_is_that_of_apply() -> None:
    net, _ = fit("tiny_gpt", lambda: [LowRankLinear(rank=0.4, min_features=8)], max_steps=1)
    assert set(net.state_dict()) == set(eff.apply(TinyGPT(), LowRankLinear(rank=0.4, min_features=8)).state_dict())
