"""Pre-norm: blocks compute what the same weights compute in torch's own pre-norm blocks, or in BERT's, written out."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_eff as eff
from lightning_eff import PreNorm
from tests.cases import Case
from tests.models import Block, TinyGPT, flat, make_batch, module

ALREADY = r"block 0 \(\w+\) has no norm behind its last sum, so it is pre-norm already"
CASES = {
    "PreNorm": Case(
        active=lambda: PreNorm(),
        neutral=lambda: PreNorm([]),
        model="bert",
        architecture=True,
        stays="PreNorm replaced .* at .*: no plain post-norm block computes pre-norm",
        refuses={
            **dict.fromkeys(("tiny_gpt", "gpt2", "llama", "vit", "videomae", "t5"), ALREADY),
            "classifier": r"block 0 \(Sequential\) has 0 residual sums and 0 norms behind them",
        },
        lost=(TinyGPT, "tiny_gpt", ALREADY),
    )
}
SIZES: dict[str, Any] = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "batch_first": True}


def gradients(net: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The loss, and the gradients by the parameters' names, where the final norm has one name."""
    torch.manual_seed(3)
    value = loss()
    value.backward()
    final = {"stack.layers.2.lightning_eff_final_norm": "stack.norm"}
    found = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return {
        "loss": value.detach(),
        **{final.get(n.rpartition(".")[0], n.rpartition(".")[0]) + n[n.rindex(".") :]: g for n, g in found.items()},
    }


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    largest = max(float(g.abs().max()) for g in expected.values())
    return got.keys() == expected.keys() and all(
        torch.allclose(got[n], expected[n], 1e-10, 1e-12 * largest) for n in expected
    )


class Around(nn.Module):
    """A stack with a head, so that it is not the root; ``mask`` marks padding."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack, self.head = stack, nn.Linear(16, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if isinstance(self.stack, nn.TransformerDecoder):
            return self.head(self.stack(x, x.flip(1) + 1.0))
        return self.head(self.stack(x, src_key_padding_mask=mask))


def shaken(net: Any) -> Any:
    """Give norms weights of their own, so that swapped ones are seen."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


def encoder(norm_first: bool, final: bool, decoder: bool = False) -> Around:
    cls: Any = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    stack: Any = nn.TransformerDecoder if decoder else nn.TransformerEncoder
    layer = cls(dropout=0.2, norm_first=norm_first, **SIZES)
    nested = {} if decoder else {"enable_nested_tensor": not norm_first}
    made = stack(layer, 3, norm=nn.LayerNorm(16) if final else None, **nested)
    return Around(made).double()


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("final", [False, True], ids=["no_norm", "final_norm"])
def test_torch_s_blocks_compute_those_of_norm_first(final: bool, decoder: bool) -> None:
    """In training with dropout, in evaluation, and without gradients, where torch has a fused post-norm kernel."""
    plain = shaken(encoder(False, final, decoder))
    reference: Any = encoder(True, True, decoder)
    reference.load_state_dict(plain.state_dict(), strict=False)
    if not final:
        last = getattr(plain.stack.layers[-1], "norm3" if decoder else "norm2")
        reference.stack.norm.load_state_dict(last.state_dict())
    x = torch.randn(4, 6, 16, dtype=torch.float64)
    net = eff.apply(copy.deepcopy(plain), PreNorm(), batch=(x,))
    mask = None if decoder else torch.arange(6) >= torch.tensor([6, 3, 5, 4])[:, None]
    for mode in (True, False):
        net.train(mode)
        reference.train(mode)
        expected = gradients(reference, lambda: reference(x, mask)[:, :3].square().mean())
        assert same(gradients(net, lambda: net(x, mask)[:, :3].square().mean()), expected)
    with torch.no_grad():
        assert torch.allclose(net(x, mask)[:, :3], reference(x, mask)[:, :3], 1e-12)
        assert not torch.allclose(plain.eval()(x), reference(x), 1e-3)


def written_out(net: Any, ids: Tensor) -> Tensor:
    """BERT's logits with pre-norm blocks, from the plain model's parts, with its last norm as the final one."""
    bert = net.model.bert
    x = bert.embeddings(ids)
    layers = bert.encoder.layer
    for layer in layers:
        own, out = layer.attention.self, layer.attention.output
        n1, n2 = out.LayerNorm, layer.output.LayerNorm
        q, k, v = (m(n1(x)).unflatten(-1, (2, -1)).transpose(1, 2) for m in (own.query, own.key, own.value))
        attended = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        x = x + out.dense(attended.transpose(1, 2).flatten(2))
        x = x + layer.output.dense(F.gelu(layer.intermediate.dense(n2(x))))
    return net.model.cls(layers[-1].output.LayerNorm(x))


def bert(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    return shaken(module("bert", num_layers=3, **kwargs).double())


def test_bert_computes_the_rule_written_out() -> None:
    plain = bert()
    net: Any = eff.apply(copy.deepcopy(plain), PreNorm())
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = gradients(plain, lambda: written_out(plain, ids).square().mean())
    got = gradients(net, lambda: net.model(input_ids=ids).logits.square().mean())
    name = "model.bert.encoder.layer.2"
    final, last = f"{name}.lightning_eff_final_norm", f"{name}.output.LayerNorm"
    for kind in ("weight", "bias"):  # one parameter in two places there
        got[f"{last}.{kind}"] = got[f"{last}.{kind}"] + got.pop(f"{final}.{kind}")
    assert same(got, expected)
    assert not torch.allclose(plain.model(input_ids=ids).logits, written_out(plain, ids), 1e-2)


def test_whole_blocks_that_are_recomputed_have_the_same_gradients() -> None:
    net: Any = eff.apply(bert(dropout=0.1), PreNorm()).train()
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = gradients(net, lambda: net.model(input_ids=ids).logits.square().mean())
    net.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    assert any(getattr(m, "gradient_checkpointing", False) for m in net.modules())
    assert same(gradients(net, lambda: net.model(input_ids=ids).logits.square().mean()), expected)


class Post(Block):
    """Hand-written post-norm blocks, and some of another form."""

    kind = ""

    def forward(self, x: Tensor) -> Tensor:
        f, g = self.proj, self.mlp
        if self.kind == "in place":
            x += f(x)
            h = self.norm1(x)
            h += g(h)
            return self.norm2(h)
        if self.kind == "one norm":
            h = self.norm1(x + f(x))
            return h + g(h)
        if self.kind == "of x":
            h = self.norm1(x + f(x))
            return self.norm2(h + g(h) * x)
        if self.kind == "function":
            h = F.layer_norm(x + f(x), (16,), self.norm1.weight, self.norm1.bias)
            return F.layer_norm(h + g(h), (16,), self.norm2.weight, self.norm2.bias)
        if self.kind == "activation":
            h = self.drop(self.mlp[1](x + f(x)))
            return self.mlp[1](h + g(h))
        if self.kind == "more":
            h = self.norm1(x + f(x))
            return 2 * self.norm2(h + g(h))
        if self.kind == "in training" and self.training:
            return self.norm1(x + f(x))
        if self.kind == "checkpointed":
            h: Any = checkpoint(lambda t: self.norm1(t + f(t)), x, use_reentrant=False)
            return self.norm2(h + g(h))
        h = self.norm1(x + f(x))
        return self.norm2(h + g(h))


def post(kind: str = "", **kwargs: Any) -> TinyGPT:
    net = TinyGPT(2, dropout=0.0, **kwargs)
    torch.manual_seed(0)
    net.blocks = nn.ModuleList(Post(16, 0.0) for _ in range(2))
    for block in net.blocks:
        block.kind = kind  # pyright: ignore[reportArgumentType]
    return shaken(net.double())


@pytest.mark.parametrize("kind", ["", "in place"])
def test_hand_written_blocks_before_a_norm_of_the_module_get_no_second_one(kind: str) -> None:
    plain = post(kind)
    net = eff.apply(copy.deepcopy(plain), PreNorm())
    copied = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    ids = make_batch("tiny_gpt")["input_ids"]

    def rule() -> Tensor:
        x = plain.embed(ids) + plain.position.weight[: ids.shape[1]]
        for block in plain.blocks or ():
            assert isinstance(block, Post)
            x = x + block.proj(block.norm1(x))
            x = x + block.mlp(block.norm2(x))
        return plain.head(plain.norm(x)).square().mean()

    expected = gradients(plain, rule)
    for made in (net, copied):
        assert same(gradients(made, lambda made=made: made(ids).square().mean()), expected)
    assert flat(net).numel() == flat(plain).numel()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one norm", r"block 0 \(Post\) has 2 residual sums and 1 norms behind them; expected h = N1"),
        ("of x", r"block 0 \(Post\) has a branch that depends on more than the norm before it"),
        ("function", r"block 0 \(Post\) has 1 residual sums and 0 norms behind them"),
        ("activation", r"block 0 \(Post\) has 1 residual sums and 0 norms behind them"),
        ("more", r"block 0 \(Post\) has 2 residual sums and 2 norms behind them"),
    ],
)
def test_blocks_of_another_form_are_refused_and_nothing_is_changed(kind: str, message: str) -> None:
    net = post(kind)
    with pytest.raises(ValueError, match=message):
        eff.apply(net, PreNorm())
    assert net.blocks is not None and type(net.blocks[0]) is Post
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_other_computations_in_training_raise_in_the_step() -> None:
    net = eff.apply(post("in training"), PreNorm())
    ids = make_batch("tiny_gpt")["input_ids"]
    net.eval()(ids)
    with pytest.raises(RuntimeError, match=r"PreNormPost ran 1 of its 2 norms behind sums"):
        net.train()(ids)
    net = eff.apply(post("checkpointed"), PreNorm())
    with pytest.raises(RuntimeError, match=r"LayerNorm was called outside of its block, where it is still a post-norm"):
        net(ids).square().mean().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_repeated_blocks_and_wrong_values_are_refused() -> None:
    net = post()
    assert net.blocks is not None
    net.blocks[1] = net.blocks[0]
    with pytest.raises(ValueError, match=r"PreNorm: "):
        eff.apply(net, PreNorm())
    with pytest.raises(ValueError, match=r"layers=3\): expected"):
        PreNorm(3)  # pyright: ignore[reportArgumentType]
    bare: Any = encoder(False, True).stack
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    eff.apply(bare, PreNorm(), batch=(x,)).eval()
    with torch.no_grad(), pytest.raises(RuntimeError, match="enable_nested_tensor=False"):
        bare(x, src_key_padding_mask=torch.arange(6) >= torch.tensor([6, 3])[:, None])


def test_the_plain_module_refuses_a_checkpoint() -> None:
    plain = post()
    net = eff.apply(copy.deepcopy(plain), PreNorm())
    with pytest.raises(RuntimeError, match="lightning_eff_mark"):
        plain.load_state_dict(net.state_dict())
    eff.apply(post(), PreNorm()).load_state_dict(net.state_dict())
