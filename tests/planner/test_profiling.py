"""The profile is what the module is: FLOPs by formula, parameters by counting, activations as autograd keeps them."""

import gc
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_eff.planner import profiling
from lightning_eff.planner.profiling import ModuleProfile, precision_of, profile_module
from tests.core.elsewhere import Elsewhere
from tests.models import TinyGPT, hugging_face, make_batch
from tests.planner.models import GPT, Flat, Llama, deep


def profiled(module: pl.LightningModule, batch: Any, precision: str = "32-true", **kwargs: Any) -> ModuleProfile:
    return profile_module(module, batch, precision=precision_of(precision), fake_mode=None, **kwargs)


def fake(make: Any, batch: Any, precision: str = "32-true") -> ModuleProfile:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        module = make()
    return profile_module(module, batch, precision=precision_of(precision), fake_mode=mode)


def test_flops_are_those_of_the_formula() -> None:
    """A layer of width h on s tokens: 24 s h^2 + 4 s^2 h forward (Narayanan et al. 2021, appendix), twice that backward."""
    layers, h, heads, s, vocab = 3, 64, 4, 32, 256
    profile = fake(lambda: GPT(layers, h, heads, vocab, s), torch.zeros(2, s, dtype=torch.long))
    for block in profile.blocks:
        assert block.forward.slope.flops == 24 * s * h * h + 4 * s * s * h
        assert block.backward.slope.flops == 2 * block.forward.slope.flops
        assert block.forward.fixed.flops == block.backward.fixed.flops == 0
    assert profile.before.forward.slope.flops == 0
    assert profile.after.forward.slope.flops == 2 * s * h * vocab
    assert profile.model_flops(5) == 15 * (layers * (24 * s * h * h + 4 * s * s * h) + 2 * s * h * vocab)


def test_fused_attention_counts_its_matmuls() -> None:
    """Scores and mixing, 4 s^2 h forward; 2.5 times that backward, where scores are computed again."""
    h, s = 64, 32
    profile = fake(lambda: hugging_face_llama(h), torch.zeros(2, s, dtype=torch.long))
    for block in profile.blocks:
        assert block.forward.slope.attention_flops == 4 * s * s * h
        assert block.backward.slope.attention_flops == 10 * s * s * h
        assert block.forward.slope.batched_flops == 0


def hugging_face_llama(width: int) -> Llama:
    return Llama(2, width, 2 * width, 8)


def test_parameters_are_divided_without_rest() -> None:
    for name in ("gpt2", "llama", "bert", "vit"):
        module = hugging_face(name)
        profile = profiled(module, make_batch(name))
        assert profile.parameters == sum(p.numel() for p in module.parameters()), name
        block = dict(module.named_modules())[profile.stack or ""]
        assert sum(b.parameters for b in profile.blocks) == sum(p.numel() for p in block.parameters()), name


def test_tied_weights_are_on_both_ends() -> None:
    profile = fake(lambda: GPT(2, 64, 4, 256, 32), torch.zeros(2, 32, dtype=torch.long))
    assert profile.shared_parameters == 256 * 64
    assert profile.before.parameters == 256 * 64 + 32 * 64 and profile.after.parameters == 2 * 64
    assert deep(Llama, 2, 32, precision_of("32-true"), 64, 128, 8).shared_parameters == 0


def test_activations_are_those_that_autograd_keeps() -> None:
    """Against a hook that knows nothing of blocks, on real tensors: each storage once, parameters left out.

    Without dropout, whose mask is of the input's type on a CPU, and of one byte where the plan is for.
    """
    module, samples = GPT(3, 32, 4, 64, 16, dropout=0.0), 6
    batch = torch.randint(0, 64, (samples, 16))
    profile = profiled(module, batch)
    parts = (profile.before, *profile.blocks, profile.after)
    predicted = sum(part.forward.at(samples).saved_bytes for part in parts)

    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    module.log = lambda *args, **kwargs: None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module.training_step(batch, 0)
    measured = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert predicted == pytest.approx(measured, rel=0.01)


def test_activations_of_a_layer_are_those_of_the_paper() -> None:
    """Korthikanti et al. 2022, equation 1: s b h (34 + 5 a s / h) bytes of a 16-bit layer with dropout."""
    h, heads, s = 512, 8, 512
    profile = fake(lambda: GPT(2, h, heads, 256, s), torch.zeros(2, s, dtype=torch.long), "bf16-true")
    assert profile.blocks[1].forward.slope.saved_bytes == pytest.approx(s * h * (34 + 5 * heads * s / h), rel=0.05)


def test_fake_tensors_count_as_real_ones_do() -> None:
    torch.manual_seed(0)
    batch = torch.randint(0, 64, (4, 16))
    real, shapes = profiled(GPT(2, 32, 4, 64, 16), batch), fake(lambda: GPT(2, 32, 4, 64, 16), batch)
    assert real == shapes


def test_a_module_larger_than_memory() -> None:
    """Two layers of Llama 3.1 405B's shape and its embeddings: 10.6 billion parameters, of which none is allocated."""
    gc.collect()
    profile = deep(Llama, 126, 8192, precision_of("bf16-mixed"), 16384, 53248, 128)
    assert profile.parameters == 405_853_388_800
    assert profile.hidden_bytes == 8192 * 16384 * 2 and profile.tokens == 8192
    assert 8 in profile.widths and 128 in profile.widths, "tensor parallelism has to divide the key heads, too"
    per_token = profile.model_flops(1) / 8192
    assert per_token == pytest.approx(6 * 403.75e9 + 14 * 126 * 16384 * 8192, rel=0.001), "embeddings are no matmul"


def test_no_stack_of_blocks() -> None:
    profile = profiled(Flat(), (torch.randn(4, 64), torch.zeros(4, dtype=torch.long)))
    assert profile.stack is None and not profile.blocks and profile.parameters == 64 * 96 + 96 + 96 * 10 + 10
    assert profile.after.forward.slope.linear_flops == 2 * (64 * 96 + 96 * 10)


class Experts(GPT):
    """As many heads of the layers' own class as there are layers, or more, which all read the last hidden state."""

    def __init__(self, heads: int, layers: int = 2) -> None:
        super().__init__(max(layers, 1), 16, 2, 32, 8)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(heads))
        if not layers:
            self.stack = nn.ModuleList()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(head(self.tokens(batch)).mean() for head in self.heads)


@pytest.mark.parametrize("make", [profiled, lambda module, batch: fake(lambda: module, batch)])
def test_lists_whose_blocks_run_side_by_side_are_no_stack(make: Any) -> None:
    batch = torch.zeros(2, 8, dtype=torch.long)
    for heads in (2, 5):
        assert make(Experts(heads), batch).stack == "stack"
    assert make(Experts(5, layers=0), batch).stack is None
    with pytest.raises(ValueError, match=r"^plan\(layers='heads'\): .* side by side.*Stacks: 'stack' \(2 x Layer\)"):
        profiled(Experts(5), batch, layers="heads")


def test_blocks_that_are_in_no_list_are_the_same_stack() -> None:
    batch = make_batch("tiny_gpt")
    plain = profiled(TinyGPT(), batch)
    for layout, layers, path in (
        ("attributes", None, "block_*"),
        ("attributes", "block_[0-3]", "block_*"),
        ("dict", None, "stages"),
        ("two halves", ["lower", "upper"], "lower.0, lower.1, upper.0, upper.1"),
        ("two halves", "lower, upper", "lower.0, lower.1, upper.0, upper.1"),
    ):
        other = profiled(Elsewhere(layout), batch, layers=layers)
        assert other.stack == path and len(other.blocks) == len(plain.blocks) == 4
        assert other.model_flops(1) == plain.model_flops(1) and other.parameters == plain.parameters


class Peeking(GPT):
    """Looks at a value."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (2.0 if loss.item() > 0 else 1.0)


def test_steps_that_cannot_be_run_are_said() -> None:
    batch = torch.zeros(2, 16, dtype=torch.long)
    with pytest.raises(ValueError, match="Pass --profile real to run it on real tensors"):
        fake(lambda: Peeking(2, 32, 4, 64, 16), batch)
    assert profiled(Peeking(2, 32, 4, 64, 16), batch).parameters
    manual = GPT(2, 32, 4, 64, 16)
    manual.automatic_optimization = False
    with pytest.raises(ValueError, match="optimizes manually"):
        profiled(manual, batch)
    with pytest.raises(ValueError, match="names no submodule"):
        profiled(GPT(2, 32, 4, 64, 16), batch, layers="nothing")
    with pytest.raises(ValueError, match=r"precision='64-true'\): expected 32-true"):
        precision_of("64-true")


def test_the_module_is_as_it_was() -> None:
    module = GPT(2, 32, 4, 64, 16)
    weights = {name: p.clone() for name, p in module.named_parameters()}
    profiled(module, torch.zeros(2, 16, dtype=torch.long))
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in module.named_parameters())
    assert not any(isinstance(m, nn.Module) and m._forward_hooks for m in module.modules())
    assert "log" not in module.__dict__


def test_equal_blocks_are_run_once_at_the_second_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortcut leaves no trace in the profile, whether blocks are alike or take turns."""

    class Turns(GPT):
        def __init__(self) -> None:
            super().__init__(6, 32, 4, 64, 16)
            for layer in list(self.stack)[1::2]:
                layer.dropout = 0.0

    batch = torch.zeros(2, 16, dtype=torch.long)
    sizes: list[int] = []
    count = profiling._count

    def counting(module: Any, blocks: list[nn.Module], *args: Any) -> Any:
        sizes.append(len(blocks))
        return count(module, blocks, *args)

    monkeypatch.setattr(profiling, "_count", counting)
    short = [fake(lambda: GPT(6, 32, 4, 64, 16), batch), fake(Turns, batch)]
    assert sizes == [6, 1, 6, 2]
    monkeypatch.setattr(profiling, "_likes", lambda counter, blocks: list(range(len(blocks))))
    assert short == [fake(lambda: GPT(6, 32, 4, 64, 16), batch), fake(Turns, batch)]
    assert short[1].blocks[0] != short[1].blocks[1] == short[1].blocks[5]
