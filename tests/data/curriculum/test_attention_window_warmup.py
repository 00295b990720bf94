"""AttentionWindowWarmup: nothing beyond the window has a part in the loss or its gradient, and attention within is exact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_eff import AttentionWindowWarmup, ExactResume, LookSAM, Rematerialization
from lightning_eff._core._attention.window import windowed_attention
from lightning_eff.data.curriculum._attention_calls import WindowedAttention
from lightning_eff.data.curriculum.attention_window_warmup import NarrowAttention, window_at
from tests.cases import Case, classifier
from tests.models import VOCAB, TinyGPT, flat, loader, module, trainer
from tests.runs import fit_yaml

CASES = {
    "AttentionWindowWarmup": Case(
        active=lambda: AttentionWindowWarmup(start=4, until=1.0, multiple_of=2),
        neutral=lambda: AttentionWindowWarmup(until=0.0),
        lost=(classifier, "classifier", "found no self-attention in training_step"),
    ),
    "NarrowAttention": Case(
        active=lambda: NarrowAttention(start=4),
        neutral=lambda: NarrowAttention(start=4096),
        lost=(classifier, "classifier", "found no self-attention in training_step"),
    ),
}


def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention by hand to the keys that are ``seen``, (.., L, L), in float64."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (t.double().repeat_interleave(n, dim=1) for t, n in ((q, 1), (k, groups), (v, groups)))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def near(length: int, window: int, *, causal: bool) -> Tensor:
    """Which key each query may see, one by one."""
    found = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            found[i, j] = abs(i - j) < window and (j <= i or not causal)
    return found


MASKS: dict[str, Callable[[int], Tensor | None]] = {
    "none": lambda length: None,
    "padding": lambda length: (torch.arange(length) < torch.tensor([[length], [length // 2]]))[:, None, None],
    "causal and padding": lambda length: (
        (torch.arange(length) >= torch.tensor([[0], [5]]))[:, None, None].expand(2, 1, length, length).tril()
    ),
    "bias of each head": lambda length: torch.randn(1, 4, length, length),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize(("length", "window", "heads"), [(23, 4, 4), (24, 5, 2), (23, 16, 1), (24, 1, 4)])
def test_attention_and_its_gradients_are_those_of_the_masked_reference(
    causal: bool, mask: str, length: int, window: int, heads: int
) -> None:
    """By chunks and by a mask, with grouped keys; and the gradient from beyond the window is 0.0."""
    if causal and mask != "none":
        return  # which torch refuses: the mask says it by itself
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, length, 8, requires_grad=True) for h in (4, heads, heads))
    given = MASKS[mask](length)
    seen = near(length, window, causal=causal or "causal" in mask)
    if given is not None and given.dtype == torch.bool:
        lost = (given & seen).any(-1, keepdim=True).logical_not() & given.any(-1, keepdim=True)
        seen = (given & seen) | (lost & torch.eye(length, dtype=torch.bool))
    bias = None if given is None or given.dtype == torch.bool else given.double()
    rows = seen.expand(2, 1, length, length).any(-1, keepdim=True)  # those that see nothing at all count for nothing
    options = {"enable_gqa": True} if heads < 4 else {}
    got = windowed_attention(q, k, v, given, window=window, is_causal=causal, **options)
    wanted = reference(q, k, v, seen | ~rows, bias)
    torch.testing.assert_close((got * rows).double(), wanted * rows, rtol=1e-5, atol=1e-5)
    weights = torch.randn(2, 4, length, 8) * rows
    ours = torch.autograd.grad((got * weights).sum(), (q, k, v), retain_graph=True)
    theirs = torch.autograd.grad((wanted * weights).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for i in (0, length // 2, length - 1):
        (reached,) = torch.autograd.grad((got * rows)[:, :, i].sum(), v, retain_graph=True)
        beyond = ~seen.expand(2, 1, length, length)[:, :, i].any(1) & rows[:, 0, i]
        assert float(reached.abs().amax((1, 3))[beyond].sum()) == 0.0, i


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [32, 200])
def test_products_of_attention_are_those_of_the_window_and_a_chunk(causal: bool, window: int) -> None:
    """Forward and backward: 16 queries at a time meet the keys that one of them sees."""
    length = 256
    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))

    def count(fn: Callable[[], Tensor]) -> int:
        counter = FlopCounterMode(display=False)
        with counter, sdpa_kernel(SDPBackend.MATH):  # what the fused kernel of a CPU multiplies is not counted
            fn().sum().backward()
        return counter.get_total_flops()

    seen = near(length, window, causal=causal)
    products = sum(16 * int(seen[i : i + 16].any(0).sum()) for i in range(0, length, 16))
    plain = count(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    found = count(lambda: windowed_attention(q, k, v, None, window=window, is_causal=causal))
    assert found / plain == pytest.approx(products / length**2)
    assert (
        products / length**2
        < {(True, 32): 0.18, (False, 32): 0.3, (True, 200): 0.53, (False, 200): 0.97}[causal, window]
    )


def test_the_rule() -> None:
    sizes = [window_at(u, 1000, start=64, until=0.5, multiple_of=64) for u in (0.0, 0.01, 0.1, 0.4, 0.499, 0.5, 1.0)]
    assert sizes == [64, 64, 192, 768, 960, 1000, 1000]
    assert window_at(0.0, 48, start=64, until=0.5, multiple_of=64) == 48


# -- in modules that know nothing of it


class Torch(pl.LightningModule):
    """A language model of torch's own layers, with a padding mask; a decoder layer meets a memory beside it."""

    def __init__(self, *, causal: bool = False, need_weights: bool = False, meets: bool = False) -> None:
        super().__init__()
        self.embed, self.causal, self.need_weights = nn.Embedding(VOCAB, 16), causal, need_weights
        self.norm, self.attention, self.head = (
            nn.LayerNorm(16),
            nn.MultiheadAttention(16, 2, batch_first=True),
            nn.Linear(16, 5),
        )
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True) if meets else None

    def hidden(self, x: Tensor, padding: Tensor | None) -> Tensor:
        x = self.norm(x)
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool() if self.causal else None
        x = x + self.attention(x, x, x, padding, self.need_weights, hidden, is_causal=False)[0]
        if self.cross is not None:
            x = x + self.cross(x, x.flip(1), x.flip(1), need_weights=False)[0]
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.hidden(self.embed(batch["input_ids"]), None).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_torchs_own_module(causal: bool, padded: bool, need_weights: bool) -> None:
    """No gradient from beyond the window, and all from within; one that meets other tokens is left alone."""
    torch.manual_seed(0)
    net, length, w = Torch(causal=causal, need_weights=need_weights), 12, 3
    x = torch.randn(2, length, 16, requires_grad=True)
    padding = (torch.arange(length) >= torch.tensor([[length], [7]])) if padded else None
    mode = WindowedAttention(lambda length: w)
    with mode:
        found = net.hidden(x, padding)
    assert mode.lengths == [length] and mode.windows == [w]
    allowed = near(length, w, causal=causal).expand(2, length, length)
    if padding is not None:
        allowed = (allowed & ~padding[:, None]) | (torch.eye(length, dtype=torch.bool) & padding[:, :, None])
    for i in range(length):
        (reached,) = torch.autograd.grad(found[:, i].sum(), x, retain_graph=True)
        moved = reached.abs().sum(-1) > 0
        expected = allowed[:, i] | (torch.arange(length) == i)
        if padding is not None:  # what padding sees is nobody's affair
            moved, expected = moved[~padding[:, i]], expected[~padding[:, i]]
        assert torch.equal(moved, expected), i
    crossing = WindowedAttention(lambda length: w)
    with crossing:
        Torch(meets=True).hidden(x, None)
    assert (len(crossing.lengths), crossing.others) == (1, 1)


FAMILIES = [
    ("gpt2", "sdpa"),
    ("gpt2", "eager"),
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("bert", "sdpa"),
    ("bert", "eager"),
]


@pytest.mark.parametrize(("name", "kind"), FAMILIES)
def test_hugging_face_models_with_padding(name: str, kind: str) -> None:
    """How far a token reaches through 2 blocks, right padded; fused and eager attention are one."""
    torch.manual_seed(0)
    net: Any = module(name, num_layers=2)
    net.model.set_attn_implementation(kind)
    net.eval()
    length, w, causal = 24, 4, name != "bert"
    embedded = torch.randn(2, length, 32, requires_grad=True)
    attention = (torch.arange(length) < torch.tensor([[length], [15]])).long()

    def out() -> Tensor:
        return net.model(inputs_embeds=embedded, attention_mask=attention).logits

    mode = WindowedAttention(lambda length: w)
    with mode:
        found = out()
    assert mode.lengths == [length] * 2 and found.isfinite().all()
    for i in (0, 9, 14, 23):
        (reached,) = torch.autograd.grad(found[:, i].sum(), embedded, retain_graph=True)
        moved = reached.abs().sum(-1) > 0
        for sample, size in ((0, length), (1, 15)):
            if i < size:
                far = [j for j in range(length) if moved[sample, j]]
                last = i if causal else min(i + 2 * (w - 1), size - 1)
                assert far == list(range(max(i - 2 * (w - 1), 0), last + 1)), (sample, i)
    with WindowedAttention(lambda length: length):
        assert torch.equal(out(), out().detach()), "a window of the whole sequence is the plain call"
    net.model.set_attn_implementation("eager" if kind == "sdpa" else "sdpa")
    with WindowedAttention(lambda length: w):
        other = out()
    torch.testing.assert_close(other[attention == 1], found[attention == 1], rtol=1e-4, atol=1e-5)


class Checkpointed(TinyGPT):
    """Its blocks run again in the backward pass."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        assert self.blocks is not None
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def trained(net: pl.LightningModule, *callbacks: Any, steps: int = 4, **kwargs: Any) -> Tensor:
    pl.seed_everything(2, verbose=False)
    trainer(*callbacks, max_steps=steps, **kwargs).fit(net, loader("tiny_gpt"))
    return flat(net)


def built(cls: type[TinyGPT]) -> TinyGPT:
    pl.seed_everything(1, verbose=False)
    return cls(num_layers=2)


def test_what_runs_again_in_the_backward_pass_has_the_window() -> None:
    def narrow() -> AttentionWindowWarmup:
        return AttentionWindowWarmup(start=4, until=1.0, multiple_of=2)

    whole = trained(built(TinyGPT), narrow())
    torch.testing.assert_close(trained(built(Checkpointed), narrow()), whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(trained(built(TinyGPT), Rematerialization(), narrow()), whole)
    assert not torch.equal(trained(built(TinyGPT), ExactResume()), whole)
    twice = trained(built(TinyGPT), LookSAM(interval=1), narrow())  # whose own gradients are torch.autograd.grad's
    assert torch.equal(trained(built(TinyGPT), LookSAM(interval=1), Rematerialization(), narrow()), twice)


def test_a_window_of_the_whole_sequence_is_plain_training() -> None:
    """To the bit, after the warm-up and wherever the window reaches the length."""
    plain = trained(built(TinyGPT), ExactResume())
    assert torch.equal(trained(built(TinyGPT), NarrowAttention(start=32)), plain)
    assert not torch.equal(trained(built(TinyGPT), NarrowAttention(start=31)), plain)


def test_windows_over_a_run_and_what_validation_sees() -> None:
    class Spy(TinyGPT):
        def __init__(self) -> None:
            super().__init__(num_layers=1)
            self.reached: dict[bool, list[int]] = {True: [], False: []}

        def forward(self, ids: Tensor) -> Tensor:
            with torch.enable_grad():
                x = torch.randn(1, 32, 16, requires_grad=True)
                assert self.blocks is not None
                (found,) = torch.autograd.grad(self.blocks[0](x)[:, -1].sum(), x)
            self.reached[self.training].append(int((found.abs().sum(-1) > 0).sum()))
            return super().forward(ids)

    seen: Any = {}
    for evaluate in ("full", "present"):
        net, technique = Spy(), AttentionWindowWarmup(start=4, until=0.5, multiple_of=4, evaluate=evaluate)  # type: ignore[arg-type]
        t = trainer(technique, max_steps=8, limit_val_batches=1, val_check_interval=2)
        t.fit(net, loader("tiny_gpt", 40), loader("tiny_gpt", 4))
        seen[evaluate] = net.reached
        assert technique.report() == {"window": 32}
        assert technique.summary() == "window of 32 of 32 tokens at the end, smaller than the sequence in 4 batches"
        assert "validation_step" not in net.__dict__
    assert seen["full"][True] == seen["present"][True] == [4, 8, 16, 24, 32, 32, 32, 32]
    assert seen["full"][False] == [32] * 4 and seen["present"][False] == [8, 24, 32, 32]


@pytest.mark.parametrize("evaluate", ["full", "present"])
def test_validation_of_a_checkpoint_sees_the_window_that_the_fit_had(evaluate: Any, tmp_path: Path) -> None:
    def build() -> AttentionWindowWarmup:
        return AttentionWindowWarmup(start=4, until=1.0, multiple_of=4, evaluate=evaluate)

    def validated(*techniques: Any, path: Path | None) -> float:
        t = trainer(*techniques, limit_val_batches=1)
        (found,) = t.validate(net, loader("tiny_gpt", 4, shuffle=False), ckpt_path=path, verbose=False)
        return next(iter(found.values()))

    net = TinyGPT(num_layers=1)
    t = trainer(build(), max_steps=4, limit_val_batches=1)
    t.fit(net, loader("tiny_gpt", 40), loader("tiny_gpt", 4, shuffle=False))
    last = t.validate(net, loader("tiny_gpt", 4, shuffle=False), verbose=False)[0]
    t.save_checkpoint(tmp_path / "a.ckpt")
    plain = validated(path=tmp_path / "a.ckpt")
    loaded = validated(build(), path=tmp_path / "a.ckpt")
    assert loaded == next(iter(last.values()))
    assert (loaded == plain) == (evaluate == "full")
    assert validated(build(), path=None) == plain, "without the state of a fit there is no window"


# -- errors and control


def test_what_cannot_be_seen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"AttentionWindowWarmup: the module 'model' \(T5.*\) is an encoder-decoder"):
        trainer(AttentionWindowWarmup(start=4), max_steps=1).fit(module("t5"), loader("t5"))
    with pytest.raises(ValueError, match=r"start=32\): attention in the first batch has only 32 tokens.*smaller start"):
        trainer(AttentionWindowWarmup(start=32), max_steps=1).fit(TinyGPT(), loader("tiny_gpt"))
    net: Any = TinyGPT()
    net.blocks[1]._compiled_call_impl = net.blocks[1].forward  # as torch.nn.Module.compile does
    with pytest.raises(ValueError, match=r"the module 'blocks.1' \(Block\) is compiled"):
        trainer(AttentionWindowWarmup(start=4), max_steps=1).fit(net, loader("tiny_gpt"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 0}, r"start=0\): expected an integer >= 1"),
        ({"multiple_of": True}, r"multiple_of=True\): expected an integer >= 1"),
        ({"until": -0.1}, r"until=-0.1\): expected a number in \[0, 1\]: the fraction"),
        ({"evaluate": "half"}, r"evaluate='half'\): expected 'full'.* or 'present'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"AttentionWindowWarmup\({message}"):
        AttentionWindowWarmup(**arguments)


def test_the_control_keeps_the_first_window() -> None:
    recipe = AttentionWindowWarmup(start=8, multiple_of=4, evaluate="present")
    (arm,) = recipe.control.arms(recipe).values()
    assert isinstance(arm, NarrowAttention) and (arm.start, arm.evaluate) == (8, "present")
    assert [arm.window_of(32, u) for u in (0.0, 0.5, 1.0)] == [8, 8, 8]
    assert recipe.control.arms(AttentionWindowWarmup(until=0.0)) == {}


def test_the_command_line_runs_it(tmp_path: Path) -> None:
    arguments = {"start": 8, "evaluate": "present"}
    fit_yaml(tmp_path, "AttentionWindowWarmup", arguments, model="TinyGPT", data="Sequences", max_steps=2)
