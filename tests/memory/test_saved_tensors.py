"""What a saved tensor is, told from the operation that saves it: one operation after another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_eff.memory._compression.saved import SavedTensors, Treatment
from tests.models import TinyGPT, hugging_face, make_batch

X = (4, 16, 32)


def roles(run: Callable[[], Any], module: nn.Module | None = None, batch: tuple[Tensor, ...] = ()) -> list[tuple]:
    """(operation, shape, category, treatment) of everything that ``run`` saves."""
    tensors = SavedTensors(module or nn.Linear(32, 32))
    tensors.begin(batch)
    found: list[tuple] = []

    def pack(x: Tensor) -> Tensor:
        role = tensors.role(x)
        found.append((tensors.operation, tuple(x.shape), role.category, role.treatment))
        return x.detach()

    with tensors, saved_tensors_hooks(pack, lambda x: x):
        run()
    return found


def treatments(run: Callable[[], Any], **kwargs: Any) -> list[Treatment]:
    return [found[-1] for found in roles(run, **kwargs)]


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape or X, requires_grad=True)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: F.gelu(x), ["GROUPS"]),
        (lambda x: F.silu(x), ["GROUPS"]),
        (lambda x: torch.tanh(x), ["GROUPS"]),
        (lambda x: x * (x + 1), ["GROUPS", "GROUPS"]),
        (lambda x: x.pow(3), ["GROUPS"]),
        (lambda x: x.pow(0.5), ["EXACT"]),
        (lambda x: x.pow(-1), ["EXACT"]),
        (lambda x: x.abs().log(), ["EXACT", "EXACT"]),
        (lambda x: x / (x + 3), ["EXACT", "EXACT"]),
        (lambda x: x.clamp(0, 1), ["EXACT"]),
        (lambda x: torch.maximum(x, x + 1), ["EXACT", "EXACT"]),
        (lambda x: F.relu(x), ["SIGN"]),
        (lambda x: F.leaky_relu(x), ["SIGN"]),
        (lambda x: F.dropout(x, 0.5), ["MASK_OR_GROUPS"]),
        (lambda x: x.masked_fill(x.detach() > 0, 0.0), ["MASK"]),
        (lambda x: x * torch.ones(X), ["MASK"]),
        (lambda x: x.norm(dim=-1, keepdim=True), ["EXACT", "EXACT"]),
        (lambda x: x.amax(), ["EXACT", "EXACT"]),
        (lambda x: x.sum(-1, keepdim=True).expand(X) * x.exp(), ["GROUPS"] * 3),
        (lambda x: F.gelu(x[:1, :1]), ["EXACT"]),
        (lambda x: F.gelu(x.double()), ["EXACT"]),
        (lambda x: F.gelu(x.half()), ["GROUPS"]),
        (lambda x: F.mse_loss(x, torch.zeros(X)), ["EXACT", "EXACT"]),
        (lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(64, dtype=torch.long)), ["EXACT"] * 4),
        (lambda x: x.log_softmax(-1) * torch.randn(X, requires_grad=True), ["EXACT", "EXACT", "GROUPS"]),
        (lambda x: x.softmax(-1), ["EXACT"]),
        (lambda x: torch.logsumexp(x, -1), ["EXACT", "EXACT"]),
    ],
)
def test_treatment_by_operation(run: Callable[[Tensor], Any], expected: list[str]) -> None:
    """In particular: nothing whose derivative has a pole or a jump is rounded, nor what belongs to a loss."""
    x = leaf()
    found = [treatment.name for treatment in treatments(lambda: run(x))]
    assert sorted(found) == sorted(expected), found


def test_parameters_and_the_batch_stay_alive() -> None:
    layer, x = nn.Linear(32, 32), torch.randn(X)
    found = treatments(lambda: layer(x), module=layer, batch=(x,))
    assert found == [Treatment.ALIVE]  # the batch needs no gradient, so the weight is not saved
    y = leaf()
    assert sorted(t.name for t in treatments(lambda: layer(y), module=layer)) == ["ALIVE", "GROUPS"]


def test_views_of_parameters_stay_alive() -> None:
    holder = nn.Embedding(64, 32)
    y = leaf(64, 32)
    assert sorted(t.name for t in treatments(lambda: y * holder.weight[:64], module=holder)) == ["ALIVE", "GROUPS"]
    assert sorted(t.name for t in treatments(lambda: y @ holder.weight.t(), module=holder)) == ["ALIVE", "GROUPS"]


def test_copies_of_weights_that_autocast_makes_are_exact() -> None:
    layer, x = nn.Linear(32, 32), leaf()

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            layer(layer(x))

    found = roles(run, module=layer)
    assert [f[2] for f in found if f[1] == (32, 32)] == ["weight_copy"] * 2
    assert [f[2] for f in found if f[1] != (32, 32)] == ["linear"] * 2


def test_copies_of_frozen_weights_are_exact_too() -> None:
    """They have no graph by which to see what they are copies of."""
    layer, weight = nn.Linear(32, 32).requires_grad_(False), nn.Parameter(torch.randn(32, 32), requires_grad=False)
    net, x = nn.ModuleList([layer, nn.Linear(32, 32)]), leaf()
    net.register_parameter("weight", weight)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.addmm(torch.zeros(32), x.flatten(0, 1), weight))

    assert [f[2] for f in roles(run, module=net)] == ["weight_copy"] * 2


def test_weights_computed_from_parameters_are_exact() -> None:
    layer, scale, x = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 1)), leaf()
    found = roles(lambda: F.linear(x, layer.weight * scale.expand(32, 32)), module=layer)
    assert [f[2] for f in found if f[0] == "linear" and len(f[1]) == 2 and f[1][0] == 32][-1] == "weight_copy"


def test_norms_keep_their_statistics() -> None:
    x = leaf()
    found = roles(lambda: (nn.LayerNorm(32)(x), nn.GroupNorm(4, 16)(x)))
    big = [f for f in found if f[1] == X]
    assert [f[3] for f in big] == [Treatment.GROUPS] * 2
    assert all(f[3] in (Treatment.EXACT, Treatment.ALIVE) for f in found if f[1] != X)
    wide = torch.randn(300, 8, requires_grad=True)  # 300 means and deviations, more than what counts as small
    found = roles(lambda: F.layer_norm(wide, (8,)))
    assert sorted(f[2] for f in found) == ["norm", "statistic", "statistic"]


@pytest.mark.parametrize("packed", [False, True])
def test_fused_attention(packed: bool) -> None:
    """q and k get 8 bits at least, also where all three are slices of one tensor; the log-sum-exp is kept exact."""
    if packed:
        q, k, v = leaf(2, 64, 96).chunk(3, dim=-1)
    else:
        q, k, v = leaf(2, 64, 32), leaf(2, 64, 32), leaf(2, 64, 32)
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (q, k, v))
    found = roles(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    by_shape = [(f[1], f[3].name) for f in found]
    assert by_shape.count(((2, 4, 64, 8), "WIDE")) == 2
    assert by_shape.count(((2, 4, 64, 8), "GROUPS")) == 2  # v and the output
    assert by_shape.count(((2, 4, 64), "MASK")) == 1  # exact, since it has more than two values


def test_unfused_attention() -> None:
    """With dropout, torch multiplies matrices: each keeps the bits it is given, and the dropout mask takes one."""
    q, k, v = (leaf(2, 4, 64, 8) for _ in range(3))
    found = roles(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1))
    assert sorted(f[3].name for f in found) == ["GROUPS"] * 5 + ["MASK"]
    assert next(f[1] for f in found if f[3] is Treatment.MASK) == (2, 4, 64, 64)


def test_multi_head_attention() -> None:
    attention, x = nn.MultiheadAttention(32, 4, batch_first=True), leaf(2, 64, 32)
    found = roles(lambda: attention(x, x, x, need_weights=False), module=attention)
    assert [f[3].name for f in found if f[1] == (2, 4, 64, 8)] == ["WIDE", "WIDE", "WIDE", "GROUPS"]
    assert [f[3].name for f in found if f[1] == (2, 4, 64)] == ["MASK"]


def test_what_checkpoints_and_custom_functions_save_is_exact() -> None:
    """A checkpoint recomputes from its input: it would recompute from a rounded one."""
    x, layer = leaf(), nn.Linear(32, 32)
    for reentrant in (False, True):
        found = roles(lambda: checkpoint(layer, x, use_reentrant=reentrant), module=layer)  # noqa: B023
        assert [f[2:] for f in found] == [("function", Treatment.EXACT)]


def test_head_and_loss_of_a_language_model() -> None:
    """Outside the blocks, linear maps and norms get 8 bits; the softmax of attention is no loss."""
    net = TinyGPT(num_layers=2)
    net.log = lambda *args, **kwargs: None
    found = roles(lambda: net.training_step(make_batch("tiny_gpt"), 0), module=net)
    assert [f[:1] + f[2:] for f in found if f[3] is Treatment.WIDE and f[0] != "scaled_dot_product_attention"] == [
        ("layer_norm", "norm", Treatment.WIDE),
        ("linear", "linear", Treatment.WIDE),
    ]
    bert = hugging_face("bert", num_layers=2)
    bert.model.config._attn_implementation = "eager"
    found = roles(lambda: bert.training_step(make_batch("bert"), 0), module=bert)
    assert [f[3] for f in found if f[0] == "softmax"] == [Treatment.GROUPS] * 2


def test_what_stands_before_the_blocks_gets_twice_the_bits() -> None:
    """As it was registered and as it runs: TinyGPT's last norm is registered before its blocks, and runs behind them."""
    bert = hugging_face("bert", num_layers=2)
    found = roles(lambda: bert.training_step(make_batch("bert"), 0), module=bert)
    assert [f[0] for f in found if f[3] is Treatment.DOUBLE] == ["layer_norm"]
    assert [f[0] for f in found if f[3] is Treatment.WIDE and f[0] != "scaled_dot_product_attention"] == [
        "linear",
        "layer_norm",
        "linear",
    ]
    tensors = SavedTensors(bert)
    assert "model.bert.embeddings.LayerNorm" in tensors._early and "model.cls.predictions.decoder" not in tensors._early
    # where no block was seen to run, as under checkpoints, what was registered behind them is still the head's
    found = roles(lambda: bert.model.cls.predictions.decoder(leaf(64, 32)), module=bert)
    assert [f[3] for f in found if f[2] == "linear"] == [Treatment.WIDE]


def test_names_and_kinds() -> None:
    net = TinyGPT(num_layers=2)
    tensors = SavedTensors(net)
    assert tensors.family("blocks.0.mlp.0:linear:0") == tensors.family("blocks.1.mlp.0:linear:0")
    assert tensors.family("blocks.0:gelu:0") == tensors.family("blocks.1:gelu:0")
    assert len({tensors.family(k) for k in ("blocks.0:gelu:0", "blocks.0:gelu:1", "blocks.0:mul:0", "head:mul:0")}) == 4
