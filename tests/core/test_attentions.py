"""Which outputs of which maps are queries, keys and values, told by the graph alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff
from lightning_eff._core._branches.attention import Attention, attentions
from lightning_eff._core._branches.finding import branches
from lightning_eff._core._branches.graph import Graph
from tests import families
from tests.models import TinyGPT, hugging_face, make_batch


def found(m: Any, batch: Any) -> list[Attention]:
    m.log = lambda *args: None
    return attentions(Graph(m.eval().training_step(batch, 0), m))


def ranges(one: Attention) -> list[tuple[str, int, list[int]]]:
    parts = [*one.query, *one.key, *one.value]
    return [(p.weight.rpartition("layers.")[2], p.dim, p.outputs.nonzero().flatten().tolist()) for p in parts]


def test_the_thirds_of_a_fused_map() -> None:
    first, second = found(TinyGPT(2), make_batch("tiny_gpt"))
    thirds = [[*range(k, k + 16)] for k in (0, 16, 32)]
    assert ranges(first) == [("blocks.0.qkv.weight", 0, third) for third in thirds]
    assert second.output == ("blocks.1.proj.weight",) and not second.cross


def test_what_was_frozen_before_the_pass_and_is_so_again_is_found_and_stays_frozen() -> None:
    m: Any = TinyGPT(2)
    m.log = lambda *args: None
    graph = Graph(m.eval().training_step(make_batch("tiny_gpt"), 0), m)
    expected = [ranges(one) for one in attentions(graph)]
    m.requires_grad_(False)
    assert [ranges(one) for one in attentions(graph)] == expected
    assert not any(p.requires_grad for p in m.parameters())


def test_a_weight_is_seen_through_a_scale_for_each_channel() -> None:
    m: Any = lightning_eff.apply(TinyGPT(2), lightning_eff.LayerScale())
    m.log = lambda *args: None
    every = branches(Graph(m.eval().training_step(make_batch("tiny_gpt"), 0), m))
    ends = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("proj", "mlp.2")]
    assert [end.weight for branch in every for end in branch.last] == ends


def test_a_transposed_map_has_its_outputs_in_the_second_dimension() -> None:
    first, *_ = found(hugging_face("gpt2", 1), make_batch("gpt2"))
    name = "model.transformer.h.0.attn.c_attn.weight"
    assert ranges(first) == [(name, 1, [*range(k, k + 32)]) for k in (0, 32, 64)]


def test_heads_whose_queries_keys_and_values_take_turns() -> None:
    """GPT-NeoX: of each head's rows, the first third are queries; names and shapes do not tell."""
    first, *_ = found(families.module("gpt_neox"), families.batch("gpt_neox", 2))
    config = families.module("gpt_neox").model.config
    size = config.hidden_size // config.num_attention_heads
    heads = range(0, 3 * config.hidden_size, 3 * size)
    for k, (_, dim, rows) in enumerate(ranges(first)):
        assert dim == 0 and rows == [row for head in heads for row in range(head + k * size, head + (k + 1) * size)]


def test_one_key_and_one_value_for_all_heads() -> None:
    (first, *_), width = found(families.module("gpt_bigcode"), families.batch("gpt_bigcode", 2)), 32
    sizes = [part.outputs.sum().item() for part in (*first.query, *first.key, *first.value)]
    assert sizes[0] == width and sizes[1] == sizes[2] < width


def test_a_decoder_attends_to_its_encoder() -> None:
    every = found(hugging_face("t5", 2), make_batch("t5"))
    assert sorted(one.cross for one in every) == [False] * 4 + [True] * 2
    for one in every:
        assert one.cross == ("EncDecAttention" in one.query[0].weight) == ("EncDecAttention" in one.output[0])
        assert [part.weight.split(".")[-2] for part in (*one.query, *one.key, *one.value)] == ["q", "k", "v"]
        assert all(part.whole for part in (*one.query, *one.key, *one.value))


class Gated(nn.Module):
    """Attention by hand, twice, whose one map also makes a gate, and whose last map is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        last = nn.Linear(8, 7)
        self.out = nn.ModuleList([nn.Linear(8, 8), last])
        self.maps = nn.ModuleList(nn.Linear(8, 32) for _ in range(2))
        nn.init.zeros_(last.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for maps, out in zip(self.maps, self.out, strict=True):
            gate, v, k, q = maps(x).chunk(4, dim=-1)
            scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
            x = out(scores.softmax(-1) @ v * gate.sigmoid())
        return F.cross_entropy(x.flatten(0, 1), batch.flatten())


def test_a_gate_of_the_same_map_is_none_of_them() -> None:
    every = found(Gated(), torch.arange(10).reshape(2, 5) % 7)
    for i, one in enumerate(every):
        assert [rows for _, _, rows in ranges(one)] == [[*range(k, k + 8)] for k in (24, 16, 8)]
        assert one.output == (f"out.{i}.weight",)
    assert len(every) == 2


def test_parts_are_read_and_written() -> None:
    one, _ = found(Gated(), torch.arange(10).reshape(2, 5) % 7)
    (part,), weight, bias = one.value, torch.arange(256.0).reshape(32, 8), torch.arange(32.0)
    torch.testing.assert_close(part.of(weight), weight[8:16], rtol=0, atol=0)
    part.put(bias, -part.of(bias))
    assert bias.tolist() == [*range(8), *(-float(i) for i in range(8, 16)), *range(16, 32)]


@pytest.mark.slow
def test_attentions_of_model_families_are_found() -> None:
    without, twice = {"mamba", "rwkv", "resnet"}, {"bart", "mbart", "marian", "pegasus", "m2m_100", "t5"}
    for name in families.FAMILIES:
        every = found(families.module(name), families.batch(name, 2))
        assert len(every) == (0 if name in without else 10 if name in twice else 4), name
        for one in every:
            parts = [*one.query, *one.key, *one.value]
            assert len(one.output) == 1 and len(parts) == 3 and all(part.outputs.any() for part in parts), name
            assert len({part.weight for part in parts}) in (1, 3), name
