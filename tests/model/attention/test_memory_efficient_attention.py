"""MemoryEfficientAttention: exact forward and backward in every kind of module, and memory that grows with the length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_eff import ExactResume, LookSAM, MemoryEfficientAttention
from lightning_eff.model.attention._replacing.chunks import chunked_attention
from tests.cases import Case, classifier
from tests.model.attention.nets import (
    HUGGING,
    OWN,
    Checkpointed,
    Net,
    gradients,
    loss_of,
    reference,
    replaced,
)
from tests.models import TinyGPT, flat, loader, trainer
from tests.runs import fit_yaml

UNSEEN = "found no attention call in training_step"
CASES = {
    "MemoryEfficientAttention": Case(
        active=lambda: MemoryEfficientAttention(chunk=8, kernel="chunks"),
        neutral=lambda: MemoryEfficientAttention(kernel="torch"),
        rounds=True,
        saves_less=True,
        lost=(classifier, "classifier", UNSEEN),
        refuses={"classifier": UNSEEN},
    )
}

MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "padding": lambda: (torch.arange(19) < torch.tensor([[19], [7]]))[:, None, None],
    "nothing seen": lambda: (torch.arange(19) < torch.tensor([[19], [0]]))[:, None, None].expand(2, 1, 23, 19),
    "bias of each head": lambda: torch.randn(1, 4, 23, 19, dtype=torch.float64, requires_grad=True),
    "bias of rows": lambda: torch.randn(2, 1, 23, 1, dtype=torch.float64, requires_grad=True),
}


@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize(("causal", "heads", "chunk"), [(False, 4, 5), (True, 2, 8), (False, 1, 64), (True, 4, 1)])
def test_chunks_are_softmax_attention_and_so_are_their_gradients(
    mask: str, causal: bool, heads: int, chunk: int
) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, h, n, e, dtype=torch.float64, requires_grad=True)
        for h, n, e in ((4, 23, 8), (heads, 19, 8), (heads, 19, 6))
    )
    given = MASKS[mask]()
    got = chunked_attention(q, k, v, given, causal=causal, scale=0.3, chunk=chunk)
    wanted = reference(q, k, v, given, causal=causal, scale=0.3)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    of = [q, k, v, *([given] if given is not None and given.requires_grad else [])]
    weights = torch.randn_like(got)
    ours, theirs = (torch.autograd.grad((t * weights).sum(), of) for t in (got, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_dropped_weights_are_the_same_ones_in_the_backward_pass_and_none_on_average() -> None:
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return chunked_attention(q, k, v, scale=0.5, dropout=0.4, chunk=4)

    assert torch.autograd.gradcheck(dropped, (q, k, v))
    values = torch.eye(64, dtype=torch.float64).expand(1, 2, 64, 64)
    q, k = (torch.randn(1, 2, 64, 4, dtype=torch.float64) for _ in range(2))
    plain = chunked_attention(q, k, values, scale=0.5, chunk=16)
    torch.manual_seed(0)
    found = torch.stack([chunked_attention(q, k, values, scale=0.5, dropout=0.4, chunk=16) for _ in range(40)])
    ratio = found / plain
    assert ratio.mean() == pytest.approx(1.0, abs=0.01)
    assert float((found == 0).double().mean()) == pytest.approx(0.4, abs=0.01)
    torch.testing.assert_close(ratio[found > 0], torch.full_like(ratio[found > 0], 1 / 0.6))
    again = (found[0] == 0).double().flatten()[:-1] @ (found[1] == 0).double().flatten()[:-1]
    assert float(again / found[0].numel()) == pytest.approx(0.16, abs=0.02), "each pass draws its own"


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found = max([self.found, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


def test_no_tensor_is_of_the_square_of_the_length_and_what_is_kept_grows_with_it() -> None:
    kept: dict[int, int] = {}
    for length in (128, 256):
        q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
        saved: list[Tensor] = []

        def pack(t: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(t)
            return t

        with saved_tensors_hooks(pack, lambda t: t), Largest() as seen:
            out = chunked_attention(q, k, v, scale=0.3, causal=True, chunk=32)
            out.sum().backward()
        kept[length] = sum({t.data_ptr(): t.nbytes for t in saved}.values())
        assert seen.found == max(2 * length * 8, 2 * 32 * 32) < 2 * length * length
    assert kept[256] == 2 * kept[128] == 2 * 128 * 2 * 4 * (4 * 8 + 1), "q, k, v, the output, and a number for each row"


def test_weights_are_computed_again_in_the_backward_pass() -> None:
    """Two products forward and five backward, of as many pairs; half as many, and a diagonal, where it is causal."""
    q, k, v = (torch.randn(1, 2, 128, 8, requires_grad=True) for _ in range(3))
    for causal, parts in ((False, 16), (True, 10)):
        product = 2 * 2 * 32 * 32 * 8 * parts
        with FlopCounterMode(display=False) as counter:
            out = chunked_attention(q, k, v, scale=0.3, causal=causal, chunk=32)
        assert counter.get_total_flops() == 2 * product
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == 5 * product


# -- in modules that know nothing of it


@pytest.mark.parametrize("name", [*HUGGING, *OWN])
def test_every_kind_of_module_has_the_same_loss_and_gradients(name: str) -> None:
    """Padded, causal, with grouped queries (Llama), windows (ModernBERT) and torch's own layers, in float64."""
    net, loss = loss_of(name)
    plain = loss()
    wanted = gradients(net, plain)
    with replaced(MemoryEfficientAttention(chunk=4, kernel="chunks").attend) as mode:
        again = loss()
        got = gradients(net, again)
    assert mode.calls >= 2 and mode.by_hand == 0
    torch.testing.assert_close(again, plain, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)
    with replaced(lambda call: torch.zeros_like(call.query)), torch.no_grad():
        assert not torch.equal(loss(), plain), "all that it attends to goes through here"


def trained(net: pl.LightningModule, *callbacks: Any, steps: int = 4, **kwargs: Any) -> Tensor:
    pl.seed_everything(2, verbose=False)
    trainer(*callbacks, max_steps=steps, **kwargs).fit(net, loader("tiny_gpt"))
    return flat(net)


def built(cls: type[TinyGPT] = TinyGPT) -> TinyGPT:
    pl.seed_everything(1, verbose=False)
    return cls(num_layers=2)


def in_chunks() -> MemoryEfficientAttention:
    return MemoryEfficientAttention(chunk=8, kernel="chunks")


def test_training_is_plain_but_for_rounding_and_what_runs_again_runs_in_chunks() -> None:
    exact = {
        "precision": "64-true"
    }  # in float32 Adam makes whole steps of the rounding that key biases have for a gradient
    close = [trained(built(), one, **exact) for one in (ExactResume(), in_chunks())]
    torch.testing.assert_close(close[1], close[0], rtol=1e-6, atol=1e-8)
    technique = in_chunks()
    got = trained(built(), technique)
    assert not torch.equal(got, trained(built(), ExactResume()))
    assert technique.report() == {"attentions": 2, "chunked": 2} and technique.summary() == "2 calls by chunks per step"
    again = in_chunks()
    assert torch.equal(trained(built(Checkpointed), again), got)
    assert again.report() == technique.report(), "what runs again is not counted"
    twice = trained(built(), LookSAM(interval=1), in_chunks())  # whose own gradients are torch.autograd.grad's
    assert torch.equal(trained(built(Checkpointed), LookSAM(interval=1), in_chunks()), twice)


def test_torchs_kernel_runs_where_it_has_one_and_says_so() -> None:
    """On a CPU: without dropout of weights. Plain training then, to the bit; with dropout chunks, which draw by themselves."""
    technique = MemoryEfficientAttention()
    assert torch.equal(trained(built(), technique), trained(built(), ExactResume()))
    assert technique.report() == {"attentions": 2, "chunked": 0} and technique.summary() == "2 calls by flash per step"
    dropping = MemoryEfficientAttention(chunk=8)
    assert trained(Net("plain", 0.2), dropping).isfinite().all()
    assert dropping.report()["chunked"] == 2
    under = MemoryEfficientAttention(chunk=8)
    assert trained(Net("plain", 0.2), under, precision="bf16-mixed").isfinite().all()
    assert under.report()["chunked"] == 2


def test_it_acts_in_evaluation_and_the_module_is_as_it_was_afterwards() -> None:
    seen: list[bool] = []

    class Spy(TinyGPT):
        def forward(self, ids: Tensor) -> Tensor:
            seen.append(bool(torch._C._len_torch_function_stack()))
            return super().forward(ids)

    net, technique = Spy(num_layers=1), in_chunks()
    t = trainer(technique, max_steps=2, limit_val_batches=1, val_check_interval=1)
    t.fit(net, loader("tiny_gpt"), loader("tiny_gpt", 4))
    assert seen == [True] * 5, "a look, two steps and two validations"
    t.validate(net, loader("tiny_gpt", 4), verbose=False)
    assert seen[-1]
    with torch.no_grad():
        net(torch.zeros(1, 4, dtype=torch.long))
    assert not seen[-1] and "training_step" not in net.__dict__


def test_what_cannot_be_replaced_is_refused() -> None:
    for kind, why in (
        ("module with weights", r"it returns attention weights.*need_weights=False"),
        ("by hand", r"found no attention call in training_step that can be replaced \(2 times as a softmax of scores"),
    ):
        net = Net(kind)
        before = flat(net).clone()
        with pytest.raises(ValueError, match=f"MemoryEfficientAttention: .*{why}"):
            trainer(in_chunks(), max_steps=2).fit(net, loader("tiny_gpt"))
        assert torch.equal(flat(net), before)
    compiled: Any = TinyGPT()
    compiled.blocks[1]._compiled_call_impl = compiled.blocks[1].forward  # as torch.nn.Module.compile does
    with pytest.raises(ValueError, match=r"the module 'blocks.1' \(Block\) is compiled"):
        trainer(in_chunks(), max_steps=2).fit(compiled, loader("tiny_gpt"))
    from torch.nn.attention.bias import causal_lower_right

    q = torch.randn(1, 2, 4, 4)
    with (
        replaced(in_chunks().attend),
        pytest.raises(ValueError, match="its attn_mask is a CausalBias, a tensor class that is not supported"),
    ):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, causal_lower_right(4, 4))
    with pytest.raises(ValueError, match="expected an integer >= 1"):
        MemoryEfficientAttention(chunk=0)
    with pytest.raises(ValueError, match="expected 'auto', 'chunks' or 'torch': the choice of the kernel"):
        MemoryEfficientAttention(kernel="math")  # type: ignore[arg-type]


def test_in_a_config(tmp_path: Path) -> None:
    settings = {"chunk": 8, "kernel": "chunks"}
    fit_yaml(tmp_path, "MemoryEfficientAttention", settings, model="TinyGPT", data="Sequences", max_steps=2)
