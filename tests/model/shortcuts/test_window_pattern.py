"""WindowPattern against attention with masks by hand; its warm-up, caches, marks, and what is refused."""

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

import lightning_eff as eff
from lightning_eff import BatchSizeWarmup, ValueResiduals, WindowPattern
from lightning_eff.model.shortcuts._windowed import Windowed, window_of
from lightning_eff.model.shortcuts.window_pattern import scale_at
from tests.cases import Case, classifier
from tests.model.attention.nets import Net, reference
from tests.model.shortcuts.nets import alike, draw, embedded, gradients, headed, loss_of, net, tokens
from tests.models import VOCAB, loader, make_batch, module, trainer

CASES = {
    "WindowPattern": Case(
        active=lambda: WindowPattern(8, pattern="SL", until=0.5, start=0.5, multiple_of=2),
        neutral=lambda: WindowPattern(pattern="L"),
        architecture=True,
        stays="a plain attention has no window",
        refuses={"classifier": "found no attention in TinyClassifier"},
        lost=(classifier, "classifier", "found no attention in TinyClassifier"),
    )
}


def near(length: int, window: int) -> Tensor:
    """Which key each query may see, one by one."""
    found = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            found[i, j] = 0 <= i - j < window
    return found


def by_hand(plain: Any, windows: list[int], ids: Tensor, lambdas: Mapping[int, Tensor]) -> Tensor:
    x, first = embedded(plain, ids), torch.empty(0)
    for i, (block, window) in enumerate(zip(plain.blocks, windows, strict=True)):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in block.qkv(block.norm1(x)).chunk(3, -1))
        first = v if i == 0 else first
        v = lambdas[i][0] * first + lambdas[i][1] * v if i in lambdas else v
        y = reference(q, k, v, near(ids.shape[1], window), causal=False, scale=8**-0.5)
        x = x + block.proj(y.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    return x


@pytest.mark.parametrize(
    ("pattern", "long", "windows"), [("SSL", None, [3, 3, 9, 3, 3]), ("LS", 5, [5, 3, 5, 3, 5]), ("S", None, [3] * 5)]
)
def test_each_block_has_the_window_of_its_letter(pattern: str, long: int | None, windows: list[int]) -> None:
    plain, at = net(), tokens()
    ours = eff.apply(copy.deepcopy(plain), WindowPattern(3, pattern=pattern, long=long))
    found = gradients(ours, loss_of(ours, at))
    alike(found, gradients(plain, headed(plain, by_hand(plain, windows, at[0], {}), at[1])))
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(loss_of(other, at), loss_of(ours, at))


def test_values_are_mixed_before_windows_cut_them() -> None:
    plain, at = net(), tokens()
    ours = eff.apply(copy.deepcopy(plain), WindowPattern(3), ValueResiduals())
    draw(ours, "value_lambdas")
    lambdas = {i: dict(ours.named_parameters())[f"blocks.{i}.value_lambdas"] for i in range(1, 5)}
    expected = headed(plain, by_hand(plain, [3, 3, 3, 9, 3], at[0], lambdas), at[1])
    torch.testing.assert_close(loss_of(ours, at), expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("kind", ["plain", "causal", "heads in front", "module", "encoder"])
def test_no_gradient_comes_from_beyond_the_window(kind: str) -> None:
    torch.manual_seed(0)
    ours: Any = eff.apply(Net(kind), WindowPattern(2, pattern="SS")).eval()
    ids = torch.randint(0, VOCAB, (1, 12))
    seen: list[Tensor] = []
    ours.embed.register_forward_hook(lambda m, a, y: seen.append(y.requires_grad_()) or y)
    logits = ours(ids)
    (grad,) = torch.autograd.grad(logits[0, 6].sum(), seen[-1])
    reached = [i for i in range(12) if grad[0, i].abs().sum() > 0]
    assert reached == ([4, 5, 6] if kind == "causal" else [4, 5, 6, 7, 8])  # one token per block on a side


def test_windows_grow_to_their_final_size() -> None:
    assert [scale_at(u, 0.25, 0.5) for u in (0.0, 0.25, 0.5, 0.75)] == [0.25, 0.625, 1.0, 1.0]
    assert scale_at(0.0, 0.25, 0.0) == 1.0
    sizes = [
        window_of(1000, final, s, 16) for final, s in ((256, 0.25), (256, 0.3), (None, 0.5), (256, 0.01), (256, 1.0))
    ]
    assert sizes == [64, 64, 496, 16, 256]
    assert window_of(8, 256, 0.5, 16) == 8 and window_of(1000, None, 1.0, 16) == 1000


class Watch(pl.Callback):
    """The scale of the windows in each training step."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    @override
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.scales.append(next(m.scale for m in pl_module.modules() if isinstance(m, Windowed)))


def test_training_steps_have_growing_windows_and_evaluation_the_final_ones() -> None:
    torch.manual_seed(0)
    plain: Any = module("translator", dropout=0.0)
    watch, technique = Watch(), WindowPattern(8, until=0.5, start=0.5, multiple_of=2)
    trainer(technique, watch, max_steps=8).fit(plain, loader("translator"))
    assert watch.scales == pytest.approx([0.5, 0.625, 0.75, 0.875, 1.0, 1.0, 1.0, 1.0])
    windowed = [m for m in plain.modules() if isinstance(m, Windowed)]
    assert [m.final for m in windowed] == [8, 8, 8, None] and all(m.scale == 1.0 for m in windowed)
    batch = make_batch("translator", 2)
    final = plain.eval()._loss(batch)
    for m in windowed:
        m.scale = 0.25
    assert torch.equal(plain.eval()._loss(batch), final)
    assert not torch.equal(plain.train()._loss(batch), final)


def test_windows_grow_together_with_the_batch() -> None:
    """As in the speedrun: both ramps follow the same fraction of the budget, which is that of optimizer steps."""
    torch.manual_seed(0)
    watch, batch = Watch(), BatchSizeWarmup(full=3, steps=2, until=0.5)
    windows = WindowPattern(8, until=0.5, start=0.5, multiple_of=2)
    sizes: list[int] = []

    class Sizes(pl.Callback):
        @override
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            sizes.append(trainer.accumulate_grad_batches)

    net: Any = module("translator", dropout=0.0)
    t = trainer(windows, batch, watch, Sizes(), max_steps=8, max_epochs=-1)
    t.fit(net, loader("translator", 240))
    steps = [scale for scale, before in zip(watch.scales, [None, *watch.scales], strict=False) if scale != before]
    assert steps == pytest.approx([0.5, 0.625, 0.75, 0.875, 1.0])  # one per optimizer step until half of the budget
    assert sizes == [1, 1, 2, 2, 3, 3, 3, 3]
    assert windows.report()["window"] == 8 and batch.report()["batches"] == 3


@torch.no_grad()
def test_generation_with_a_cache_equals_that_without() -> None:
    ours: Any = eff.apply(module("llama").eval(), WindowPattern(3))
    ids = make_batch("llama", 2)["input_ids"][:, :9]
    whole = ours.model(ids).logits[:, -1]
    step = ours.model(ids[:, :6], use_cache=True)
    for i in range(6, 9):
        step = ours.model(ids[:, i : i + 1], past_key_values=step.past_key_values, use_cache=True)
    torch.testing.assert_close(step.logits[:, -1], whole, rtol=1e-4, atol=1e-5)
    plain: Any = module("llama").eval()
    plain.load_state_dict(ours.state_dict(), strict=False)
    assert (plain.model(ids).logits[:, -1] - whole).abs().max() > 1e-4


def test_marks_tell_windows_apart() -> None:
    ours = eff.apply(net(), WindowPattern(3))
    with pytest.raises(RuntimeError, match="lightning_eff_mark"):
        net().load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match="of the checkpoint is not attention within 4 tokens"):
        eff.apply(net(), WindowPattern(4)).load_state_dict(ours.state_dict())


def test_what_cannot_have_windows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"WindowPattern\(pattern='SXL'\): expected the letters S and L"):
        WindowPattern(pattern="SXL")
    with pytest.raises(ValueError, match=r"WindowPattern\(short=0\)"):
        WindowPattern(0)
    with pytest.raises(ValueError, match=r"attend at several places .*SelfAttention"):
        eff.apply(module("t5"), WindowPattern(4, layers="model.decoder.block"))
    with pytest.raises(ValueError, match="has no end"):
        trainer(WindowPattern(8, until=0.5), max_steps=-1, max_epochs=-1).fit(
            module("translator"), loader("translator")
        )
