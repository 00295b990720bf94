"""Linear maps found in a module, those that stay with the reason, and the exchange of the others for a run."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff.model.growth.progressive_stacking import ProgressiveStacking
from lightning_eff.precision._linear.maps import LinearMap, heads, linear_maps, sort_out
from lightning_eff.precision._linear.plugin import LinearPrecision
from lightning_eff.precision._linear.products import Arithmetic
from lightning_eff.precision.int8 import INT8Precision
from tests.models import TinyGPT, hugging_face, loader, trainer
from tests.runs import differences, final_state, fit


class Halved(LinearPrecision):
    """Linear maps with half of their result, and a count of calls."""

    def __init__(self, base: Any = "32-true", skip: Any = ("head",), factor: float = 0.5) -> None:
        super().__init__(base, skip=skip)
        self.factor = factor
        self.dtypes: set[tuple[torch.dtype, torch.dtype]] = set()

    def arithmetic(self, m: LinearMap) -> Arithmetic:
        def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            assert weight.shape == (m.out_features, m.in_features) and x.shape[-1] == m.in_features
            self.dtypes.add((x.dtype, weight.dtype))
            return self.factor * F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

        return compute

    def describe(self) -> str:
        return "halves"


def test_gpt2s_own_linear_maps_are_seen() -> None:
    net = hugging_face("gpt2", num_layers=2)
    maps = {m.path: m for m in linear_maps(net)}
    assert len(maps) == 2 * 4 + 1
    fc = maps["model.transformer.h.0.mlp.c_fc"]
    assert (fc.in_features, fc.out_features, fc.transposed) == (32, 128, True)
    head = maps["model.lm_head"]
    assert (head.in_features, head.out_features, head.transposed) == (32, 61, False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", {"model.lm_head"}),
        ("llama", {"model.lm_head"}),
        ("bert", {"model.cls.predictions.transform.dense", "model.cls.predictions.decoder"}),
        ("vit", {"model.classifier"}),
    ],
)
def test_the_head_is_what_lies_outside_the_blocks(name: str, expected: set[str]) -> None:
    net = hugging_face(name)
    assert heads(net, linear_maps(net)) == expected
    chosen, kept = sort_out(net, ("head",))
    assert not {m.path for m in chosen} & expected and len(kept) == len(expected)
    assert all("outside the blocks" in reason for reason in kept.values())
    everything, nothing = sort_out(net, ())
    assert len(everything) == len(chosen) + len(expected) and nothing == {}


def test_the_head_without_blocks_is_the_last_map_and_what_shares_an_embedding() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    net[3].weight = net[0].weight
    assert heads(net, linear_maps(net)) == {"3", "4"}


def test_named_paths_and_rules_and_attentions_own_map_stay() -> None:
    net = nn.ModuleDict(
        {"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), "c": nn.Linear(4, 2)}
    )
    net["d"] = nn.MultiheadAttention(8, 2)
    chosen, kept = sort_out(net, ("b",), [lambda m: "narrow" if m.out_features < 4 else None])
    assert [m.path for m in chosen] == ["a"]
    assert {path.split()[0]: reason.split(" by ")[0] for path, reason in kept.items()} == {
        "b.0": "skip names 'b'",
        "b.1": "skip names 'b'",
        "c": "narrow",
        "d.out_proj": "its weight is used",
    }


@pytest.mark.parametrize(("base", "seen"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
@pytest.mark.parametrize("model", ["gpt2", "tiny_gpt"])
def test_what_runs_gets_the_dtypes_of_the_base(base: str, seen: torch.dtype, model: str) -> None:
    plugin = Halved(base)
    net, _ = fit(model, list, plugins=[plugin], max_steps=2)
    plain, _ = fit(model, list, precision=base, max_steps=2)
    assert plugin.dtypes == {(seen, torch.float32)}
    assert not torch.equal(
        net.state_dict()[next(iter(net.state_dict()))], plain.state_dict()[next(iter(net.state_dict()))]
    )


def test_the_same_arithmetic_is_plain_training() -> None:
    whole = final_state(*fit("tiny_gpt", list, plugins=[Halved(factor=1.0)]))
    assert differences(whole, final_state(*fit("tiny_gpt", list))) == []


def test_the_module_is_put_back_and_a_copy_is_plain() -> None:
    net, copies = TinyGPT(), []
    linear = net.get_submodule("blocks.0.proj")
    x = torch.randn(2, 16)
    expected = linear(x)
    plugin = Halved()
    net.on_train_start = lambda: copies.append((copy.deepcopy(linear), linear(x)))  # type: ignore[method-assign]
    before = sorted(linear.__dict__)
    trainer(max_steps=1, plugins=[plugin]).fit(net, loader("tiny_gpt"))
    ((copied, inside),) = copies
    assert torch.allclose(inside, expected / 2)
    assert torch.allclose(copied(x), expected) and copied.weight is not linear.weight
    assert sorted(linear.__dict__) == before and plugin._maps == []


def test_keyword_calls() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plugin = Halved()
    plugin.convert_module(net)
    x = torch.randn(3, 4)
    assert torch.equal(net[0](input=x), net[0](x))


def test_nothing_left_is_an_error_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ValueError, match=r"Halved\(skip=.*\): found no linear layer .*0 \(4 to 4\): part of the head, outside"
    ):
        Halved().convert_module(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"the module has no nn\.Linear or Conv1D"):
        Halved().convert_module(nn.Conv2d(3, 3, 3))
    with pytest.raises(ValueError, match=r"skip='head'\): expected a list of keywords or dotted paths.* Write a tuple"):
        Halved(skip="head")


def test_the_log_says_what_stays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        Halved().convert_module(hugging_face("gpt2", num_layers=2))
    assert "Halved: 8 linear layers run in halves" in caplog.text
    assert "unchanged, part of the head, outside the blocks: model.lm_head (32 to 61)" in caplog.text


def test_maps_that_no_step_calls_are_warned_of() -> None:
    net = TinyGPT()
    assert net.blocks is not None
    net.blocks[1].unused = nn.Linear(4, 4)
    net.other = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match=r"the first training step did not call blocks\.1\.unused, other\."):
        trainer(max_steps=1, plugins=[Halved(skip=())]).fit(net, loader("tiny_gpt"))


def test_blocks_that_do_not_run_yet_are_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    fit("tiny_gpt", lambda: [ProgressiveStacking(stages=[(0.0, 1), (0.5, 4)])], plugins=[Halved()], max_steps=4)
    assert not [w for w in recwarn if "did not call" in str(w.message)]


def test_random_numbers_are_apart_and_repeat() -> None:
    def draws(plugin: Halved) -> list[float]:
        device = torch.device("cpu")
        with plugin.train_step_context():
            found = [float(torch.rand((), generator=plugin.generator(path, device))) for path in ("a", "a", "b")]
        plugin._passes += 1  # as a backward pass does
        return found

    torch.manual_seed(0)
    plugin = Halved()
    first, second = draws(plugin), draws(plugin)
    assert len({*first, *second}) == 6
    resumed = Halved()
    resumed.load_state_dict({**plugin.state_dict(), "passes": 1})
    assert draws(resumed) == second


class Adds(TinyGPT):
    """Its own code adds into a float32 tensor, as layers of graphs and mixtures of experts do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        made = torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
        return loss + torch.zeros(2, 2).index_add(0, torch.arange(2), made).sum() * 0


def test_an_error_about_dtypes_names_the_plugin_and_the_way_out() -> None:
    with pytest.raises(RuntimeError, match="must have the same scalar type") as caught:
        trainer(max_steps=1, plugins=[INT8Precision()]).fit(Adds(2), loader("tiny_gpt"))
    assert caught.value.__notes__[0].endswith("To keep it in float32: INT8Precision('32-true').")
    trainer(max_steps=1, plugins=[INT8Precision("32-true")]).fit(Adds(2), loader("tiny_gpt"))
