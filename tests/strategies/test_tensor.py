"""Tensor parallelism of unchanged modules: what is split, and that loss, gradients and parameters stay the module's."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.strategies._tensor.exercise import exercised
from lightning_eff.strategies._tensor.given import matches, wildcard
from lightning_eff.strategies._tensor.sections import routes
from lightning_eff.strategies._tensor.trace import Call, Record
from tests.conftest import Once
from tests.selection import share_of
from tests.strategies.launch import launch
from tests.strategies.tensor_jobs import PLANS

pytestmark = pytest.mark.timeout(900)  # the first test starts all cases, about 40 s on two idle cores

GRAD = 3e-7  # of gradients of up to about 1; a wrong split is off by 1e-2 and more
PAIR = ("colwise", "rowwise")

# case -> styles that must be found
EQUAL: dict[str, dict[str, str]] = {
    "tiny_gpt": {
        "embed": "embedding_colwise",  # 61 rows
        "blocks.0.qkv": "colwise_gather_output",  # its code names the heads as a number
        "blocks.1.mlp.0": "colwise",
        "blocks.1.mlp.2": "rowwise",
        "head": "rowwise_split_input",
    },
    "hand": {
        "embed": "embedding_rowwise",
        "blocks.0.attention.q": "colwise",
        "blocks.0.attention.o": "rowwise",
        "blocks.1.mlp.gate": "colwise",
        "blocks.1.mlp.up": "colwise",
        "blocks.1.mlp.down": "rowwise",
        "head": "colwise_gather_output",
    },
    "hand_tied": {"embed": "gather", "blocks.0.attention.o": "rowwise"},
    "padded": {"embed": "embedding_colwise"},
    "gpt2": {
        "model.transformer.wte": "embedding_colwise",
        "model.lm_head": "rowwise_split_input",
        "model.transformer.h.1.attn.c_attn": "packed_colwise:32,32,32",
        "model.transformer.h.1.attn.c_proj": "rowwise",
        "model.transformer.h.1.mlp.c_fc": "colwise",
        "model.transformer.h.1.mlp.c_proj": "rowwise",
    },
    "llama": {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.1.self_attn.k_proj": "colwise",
        "model.layers.1.self_attn.o_proj": "rowwise",
        "model.layers.1.mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    "llama_tied": {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"},
    "llama_1kv": {
        "model.layers.0.self_attn.q_proj": "colwise",
        "model.layers.0.self_attn.k_proj": "colwise_replicated",
        "model.layers.0.self_attn.o_proj": "rowwise",
        "model.layers.0.mlp.down_proj": "rowwise",
    },
    "bert": {
        "model.bert.embeddings.word_embeddings": "embedding_colwise",
        "model.bert.encoder.layer.0.attention.self.query": "colwise",
        "model.bert.encoder.layer.0.attention.output.dense": "rowwise",
        "model.bert.encoder.layer.0.intermediate.dense": "colwise",
        "model.bert.encoder.layer.0.output.dense": "rowwise",
        "model.cls.predictions.decoder": "rowwise_split_input",
    },
    "vit": {
        "model.vit.embeddings.patch_embeddings.projection": "gather",
        "model.vit.layers.0.attention.q_proj": "colwise",
        "model.vit.layers.0.attention.o_proj": "rowwise",
        "model.vit.layers.0.mlp.fc1": "colwise",
        "model.classifier": "rowwise_split_input",
    },
    "qwen3": {
        "model.layers.0.self_attn.q_norm": "replicated_with_grad_allreduce",
        "model.layers.0.self_attn.q_proj": "colwise",
    },
    "fused": {"blocks.0.attention.qkv": "packed_colwise:16,16,16", "blocks.0.mlp.gate_up": "packed_colwise:32,32"},
    "fused_gqa": {
        "blocks.0.attention.qkv": "packed_colwise:16,8,8",
        "blocks.0.attention.o": "rowwise",
        "blocks.0.mlp.gate_up": "colwise_gather_output",  # a norm over all features before the last layer
        "blocks.0.mlp.down": "colwise_gather_output",
    },
    "qk_norm": {
        "blocks.0.attention.q": "colwise",
        "blocks.0.attention.q_norm": "replicated_with_grad_allreduce",
        "blocks.0.attention.o": "rowwise",
    },
    "literal": {
        "blocks.0.attention.qkv": "colwise_gather_output",
        "blocks.0.attention.o": "colwise_gather_output",
        "blocks.0.mlp.down": "rowwise",
    },
    "adding": {"blocks.0.mlp.fc1": "colwise", "blocks.0.mlp.fc2": "rowwise"},
    "shared_head": {"embed": "embedding_rowwise", "head": "colwise_gather_output"},
    "uniform": {"blocks.0.attention.qkv": "colwise_gather_output", "blocks.0.mlp.down": "rowwise"},
    "torch": {"blocks.0.attention.attention": "gather", "blocks.0.attention.attention.out_proj": "gather"},
    "odd": {"blocks.0.mlp.fc1": "colwise", "blocks.0.mlp.fc2": "rowwise", "blocks.0.mlp.memory": "gather"},
    "penalised": {
        "blocks.0.attention.o": "rowwise",
        "blocks.0.mlp.up": "gather",
        "blocks.0.mlp.down": "colwise_gather_output",
        "blocks.0.mlp.other": "gather",
    },
    "frozen": {"blocks.0.attention.q": "colwise", "blocks.1.mlp.down": "rowwise"},
}
RIGHT = [
    name
    for name in PLANS
    if name in ("mlp", "attention", "packed", "qk_norm", "conv1d", "gather", "unchecked", "unchecked_hand")
]
WRONG = {
    "no_module": ["'blocks.*.fc1'", "blocks.*.mlp.gate", "Candidates"],
    "no_style": ["'diagonal'", "rowwise_split_input"],
    "empty": ["empty plan", "auto"],
    "word": ["'megatron'", "auto"],
    "no_row": ["'blocks.0.mlp.down'"],
    "one_of_two": ["'blocks.0.mlp'"],
    "literal_heads": ["'blocks.1.attention.o'", "loss"],
    "norm_partial": ["_norm.weight", "gradient"],
    "rows_odd": ["'head'", "61 output features", "2 ranks"],
    "kv_heads": ["4 heads", "1 key-value heads", "tensor_parallel_size=2"],
    "tied_apart": ["shared", "equally"],
    "read_elsewhere": ["mixed torch.Tensor and DTensor"],
}
OTHERS = [
    "sequence:hand",
    "odd_sequence:hand",
    "dropout:tiny_gpt",
    "dropout:hand",
    "dropout:dropping",
    "autocast:hand",
    "recomputed:reentrant",
    "recomputed:not_reentrant",
    "meta:llama",
    "meta:hand",
    "memory:gpt2",
    "memory:llama",
    "float8:hand",
    "equal:bf16",
    "odd_heads:hand",
    "apart:weights",
    "apart:batch",
]


HALF = [name for name in EQUAL if share_of(2, name) == 0]


@pytest.fixture(scope="module")
def results(once: Once) -> dict[str, Any]:
    """All cases on two processes that start once."""
    names = [f"equal:{name}" for name in HALF] + [f"plan:{name}" for name in PLANS] + OTHERS
    return once("tensor", lambda: launch("tests.strategies.tensor_jobs", "run_cases", *names, world_size=2))


def is_right(result: dict[str, Any], grad: float = GRAD, loss: float = 2e-6) -> None:
    """Loss, gradients and parameters are the whole module's."""
    assert "error" not in result, result["error"]
    assert result["loss"] <= loss
    assert result["grad"] <= grad
    assert result["param"] == 0.0, "full_tensor() is not the original parameter"
    assert result["evaluated"] <= loss, "inference mode"
    assert result["placements"], "a gradient has another placement than its parameter"


@pytest.fixture(scope="module")
def other_half(once: Once) -> dict[str, Any]:
    names = [f"equal:{name}" for name in EQUAL if name not in HALF]
    return once("tensor_other_half", lambda: launch("tests.strategies.tensor_jobs", "run_cases", *names, world_size=2))


@pytest.mark.parametrize("name", HALF)
def test_found_plans_are_right(results: dict[str, Any], name: str) -> None:
    _found_right(results[f"equal:{name}"], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EQUAL if name not in HALF])
def test_the_other_found_plans_are_right(other_half: dict[str, Any], name: str) -> None:
    _found_right(other_half[f"equal:{name}"], name)


def _found_right(result: dict[str, Any], name: str) -> None:
    is_right(result)
    assert result["keys"] and result["verified"]
    styles = result["styles"]
    assert {path: styles.get(path) for path in EQUAL[name]} == EQUAL[name], result["plan"]
    assert abs(result["share"] * 2 - 1) < 0.05, result["plan"]


@pytest.mark.parametrize("name", RIGHT)
def test_given_plans_are_right(results: dict[str, Any], name: str) -> None:
    result = results[f"plan:{name}"]
    is_right(result)
    assert result["verified"] == (not name.startswith("unchecked"))
    assert ("not checked" in result["plan"]) == name.startswith("unchecked")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_plans_are_refused_and_leave_no_trace(results: dict[str, Any], name: str) -> None:
    result = results[f"plan:{name}"]
    assert result.get("kept"), result
    for words in WRONG[name]:
        assert words in result["error"]


def test_every_plan_is_tested() -> None:
    assert {*RIGHT, *WRONG} == set(PLANS)


def test_a_given_plan_divides_heads(results: dict[str, Any]) -> None:
    assert results["plan:attention"]["notes"] == ["divided by 2: blocks.*.attention.n_heads"]


@pytest.mark.parametrize("kind", ["sequence", "odd_sequence"])
def test_norms_compute_parts_of_the_sequence(results: dict[str, Any], kind: str) -> None:
    result = results[f"{kind}:hand"]
    is_right(result)
    assert result["styles"]["blocks.0.norm1"] == result["styles"]["norm"] == "sequence_parallel"


@pytest.mark.parametrize("name", ["tiny_gpt", "hand"])
def test_random_numbers_are_alike_and_dropout_is_exact_in_whole_regions(results: dict[str, Any], name: str) -> None:
    result = results[f"dropout:{name}"]
    is_right(result)
    assert result["alike"]
    assert result["kept"], "setup drew random numbers"


def test_norms_beside_a_given_plan_and_without_a_batch(results: dict[str, Any]) -> None:
    assert results["plan:mlp"]["styles"]["norm"] == "sequence_parallel"
    assert results["meta:llama"]["notes"] == [
        "no norm computes parts of the sequence: there is no batch to find norms on"
    ]


def test_dropout_within_a_pair_does_not_hide_it(results: dict[str, Any]) -> None:
    result = results["dropout:dropping"]
    assert result["alike"] and result["placements"] and result["param"] == 0.0
    styles = result["styles"]
    assert [styles[f"blocks.0.attention.{path}"] for path in ("attention.q", "attention.o", "fc1", "fc2")] == [
        *PAIR,
        *PAIR,
    ]


def test_bf16_finds_the_same_plan(results: dict[str, Any]) -> None:
    is_right(results["autocast:hand"], grad=2e-3, loss=2e-3)
    is_right(results["equal:bf16"], grad=5e-3, loss=2e-2)
    for case in ("autocast:hand", "equal:bf16"):
        styles = results[case]["styles"]
        assert [styles[f"blocks.0.{path}"] for path in ("attention.q", "attention.o", "mlp.up", "mlp.down")] == [
            *PAIR,
            *PAIR,
        ]


@pytest.mark.parametrize("name", ["reentrant", "not_reentrant"])
def test_recomputed_blocks(results: dict[str, Any], name: str) -> None:
    is_right(results[f"recomputed:{name}"])
    assert results[f"recomputed:{name}"]["styles"]["blocks.0.mlp.down"] == "rowwise"


@pytest.mark.parametrize("name", ["llama", "hand"])
def test_meta_device(results: dict[str, Any], name: str) -> None:
    result = results[f"meta:{name}"]
    is_right(result)
    assert not result["verified"] and abs(result["share"] * 2 - 1) < 0.05


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_whole_parameters_are_freed(results: dict[str, Any], name: str) -> None:
    assert abs(results[f"memory:{name}"]["share"] * 2 - 1) < 0.05
    assert results[f"memory:{name}"]["alive"] == 0


def test_low_precision_maps_are_split(results: dict[str, Any]) -> None:
    result = results["float8:hand"]
    is_right(result, grad=2e-2, loss=5e-3)
    assert result["styles"]["blocks.0.attention.q"] == "colwise"


def test_heads_that_do_not_divide_are_refused(results: dict[str, Any]) -> None:
    for words in ("'blocks.0.attention'", "3 attention heads", "tensor_parallel_size=2", '"gather"'):
        assert words in results["odd_heads:hand"]["error"]


def test_ranks_with_other_weights_or_batches_are_refused(results: dict[str, Any]) -> None:
    assert "'position' differs" in results["apart:weights"]["error"]
    assert "so their batches differ" in results["apart:batch"]["error"]


def test_the_plan_prints_as_a_table(results: dict[str, Any]) -> None:
    lines = results["equal:gpt2"]["plan"].splitlines()
    assert lines[0].startswith("Tensor parallel over 2 ranks, 50.")
    (line,) = [line for line in lines if "attn.c_attn" in line]
    assert line.split()[:3] == ["model.transformer.h.*.attn.c_attn", "(2)", "packed_colwise:32,32,32"]
    assert "num_heads" in line
    (note,) = [line for line in results["equal:literal"]["plan"].splitlines() if "note" in line]
    assert "blocks.*.attention.qkv -> blocks.*.attention.o is no pair" in note


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_parameters_have_telling_sizes_while_splits_are_checked_and_their_own_afterwards(dtype: torch.dtype) -> None:
    first, norm, last = nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 8, bias=False)
    module = nn.Sequential(first, norm, last)
    module.register_parameter("gate", nn.Parameter(torch.zeros(4, 8)))
    with torch.no_grad():
        first.weight.mul_(torch.logspace(-4, 1, 24)[:, None])
        first.weight[3] = 0.0
        first.bias.mul_(1e-3)
        norm.bias.zero_()
    module.to(dtype)
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    record = Record(calls=[Call("0", None, None, 1e-4), Call("2", None, None, 0.5)])
    with exercised(module, record):
        rows = first.weight.float().norm(dim=1)
        assert rows.isfinite().all() and rows.max() < 1e4 and rows.min() > rows.max() / 50  # from 1e5 apart
        assert all(param.detach().float().square().mean().sqrt() > 0.05 for param in module.parameters())
        assert torch.equal(last.weight, before["2.weight"] * (last.weight / before["2.weight"]).round())
    assert all(torch.equal(param, before[name]) for name, param in module.named_parameters())


@pytest.mark.parametrize("sections", [(8,), (4, 4), (8, 8, 8), (16, 8, 8), (12, 4)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_routes_give_each_rank_its_part_of_every_section(sections: tuple[int, ...], size: int) -> None:
    rows = torch.arange(sum(sections))
    parts = [part.chunk(size) for part in rows.split(list(sections))]
    ways = [routes(sections, size, rank) for rank in range(size)]
    sent = [rows.chunk(size)[rank][way.send].split(list(way.send_counts)) for rank, way in enumerate(ways)]
    for rank, way in enumerate(ways):
        arrived = torch.cat([sent[source][rank] for source in range(size)])
        assert way.receive_counts == tuple(len(sent[source][rank]) for source in range(size))
        got = torch.empty_like(arrived)
        got[way.receive] = arrived
        assert torch.equal(got, torch.cat([part[rank] for part in parts]))


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("layers.3.fc1", "layers.*.fc1", True),
        ("layers.3.mlp.fc1", "layers.*.fc1", False),
        ("layers.3.mlp.fc1", "**.fc1", True),
        ("fc1", "**.fc1", True),
        ("layers.3.attention.q", "**.[qkv]", True),
        ("layers.3", "layers", False),
        ("a.b", "**", True),
    ],
)
def test_patterns(path: str, pattern: str, expected: bool) -> None:
    assert matches(path, pattern) is expected


def test_wildcards_collapse_indices() -> None:
    assert wildcard("model.layers.12.mlp.fc1") == "model.layers.*.mlp.fc1"
    assert wildcard("w1.layer2") == "w1.layer2"
