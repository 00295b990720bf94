"""BlockSparsity: regrouping is undone exactly, as many numbers are kept as is asked for, and they are dense blocks."""

import json
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import BlockSparsity
from lightning_eff.model.sparsity.block_sparsity import blocks_of, groups_of, regroup, ungroup
from tests.cases import Case, no_map
from tests.families import module as family
from tests.model.sparsity.sparse import Counts, fit_on
from tests.models import TinyClassifier, TinyGPT, hugging_face, loader, make_batch, trainer
from tests.runs import fit_yaml

ROOT = Path(__file__).parents[3]
CASES = {
    "BlockSparsity": Case(
        active=lambda: BlockSparsity(sparsity=0.5, size=4, start=0.3),
        neutral=lambda: BlockSparsity(sparsity=0.0),
        lost=(no_map, "classifier", "no trainable weight of a linear layer or convolution"),
    )
}


# -- the rules


@pytest.mark.parametrize("shape", [(8, 5), (12, 3, 2), (6, 4, 3, 3)])
def test_regrouping_is_undone_exactly(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    w, order = torch.randn(shape), torch.randperm(shape[0])
    assert torch.equal(ungroup(regroup(w, order), order), w)
    assert torch.equal(regroup(ungroup(w, order), order), w)
    for place, row in enumerate(order.tolist()):
        assert torch.equal(regroup(w, order)[place], w[row])


def test_rows_that_keep_the_same_columns_come_into_one_group() -> None:
    torch.manual_seed(0)
    kinds = torch.zeros(4, 12, dtype=torch.bool)
    for i in range(4):
        kinds[i, 3 * i : 3 * i + 3] = True
    kind = torch.tensor([*range(4)] * 5)[torch.randperm(20)]
    order = groups_of(kinds[kind], 5)
    assert sorted(order.tolist()) == [*range(20)]
    assert all(len(set(group)) == 1 for group in kind[order].view(4, 5).tolist())
    # dense blocks then lose nothing
    scores = kinds[kind] * torch.rand(20, 12).add(0.1)
    assert torch.equal(blocks_of(scores, order, 5, 12), scores > 0)


def jaccard(sets: list[set[int]], i: int, j: int) -> float:
    return len(sets[i] & sets[j]) / len(sets[i] | sets[j]) if sets[i] | sets[j] else 0.0


def test_groups_are_of_the_likest_rows_by_sets_of_columns() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        kept = torch.rand(12, 6) < 0.4 if seed else torch.ones(12, 6, dtype=torch.bool)
        sets = [{c for c in range(6) if kept[r, c]} for r in range(12)]
        left, expected = [*range(12)], list[int]()
        while left:
            first = max(left, key=lambda r: len(sets[r]))  # of equal ones the first

            group = sorted(left, key=partial(jaccard, sets, first), reverse=True)[:4]
            expected += group
            left = [r for r in left if r not in group]
        assert groups_of(kept, 4).tolist() == expected


def test_blocks_are_those_of_the_largest_sums_of_all() -> None:
    torch.manual_seed(0)
    scores, order, size = torch.rand(4, 3), torch.tensor([2, 0, 3, 1]), 2
    groups = [[2, 0], [3, 1]]
    sums = {(g, c): sum(float(scores[r, c]) for r in groups[g]) for g in range(2) for c in range(3)}
    best = max(combinations(sums, 3), key=lambda some: sum(sums[one] for one in some))
    expected = torch.zeros(4, 3, dtype=torch.bool)
    for g, c in best:
        expected[groups[g], c] = True
    assert torch.equal(blocks_of(scores, order, size, 3), expected)


def test_regrouping_keeps_more_than_rows_as_they_stand_and_at_most_what_the_best_grouping_does() -> None:
    def kept(scores: Tensor, order: Tensor) -> float:
        return float(scores[blocks_of(scores, order, 2, 8)].sum())

    like, plain, best = 0.0, 0.0, 0.0
    for seed in range(10):
        torch.manual_seed(seed)
        scores = torch.rand(6, 8) ** 4
        flat = torch.zeros(48, dtype=torch.bool).index_fill_(0, scores.flatten().topk(16).indices, True).view(6, 8)
        like += kept(scores, groups_of(flat, 2))
        plain += kept(scores, torch.arange(6))
        best += max(kept(scores, torch.tensor(order)) for order in permutations(range(6)))
    assert plain < like <= best
    assert like - plain > 0.4 * (best - plain)


# -- the run


def assert_dense_blocks(technique: BlockSparsity, name: str, mask: Tensor) -> None:
    """Rows of a group keep the same whole kernels."""
    orders = technique.orders[name]
    for matrix, order in zip(mask, orders, strict=True) if orders.ndim == 2 else ((mask, orders),):
        kernels = matrix.flatten(2) if matrix.ndim > 2 else matrix.unsqueeze(2)
        assert torch.equal(kernels.any(2), kernels.all(2))
        groups = kernels[order].all(2).unflatten(0, (-1, technique.size))
        assert torch.equal(groups.any(1), groups.all(1))


@pytest.mark.parametrize(("name", "size"), [("gpt2", 8), ("vit", 8), ("resnet", 4), ("qwen3_moe", 8)])
@pytest.mark.parametrize("distribution", ["uniform", "erk"])
def test_kept_numbers_are_as_many_as_asked_for_and_lie_in_dense_blocks(name: str, size: int, distribution: Any) -> None:
    torch.manual_seed(0)
    net = family(name) if name in ("resnet", "qwen3_moe") else hugging_face(name, 2)
    technique = BlockSparsity(sparsity=0.75, size=size, start=0.0, distribution=distribution)
    counts = fit_on(net, make_batch("vit" if name in ("vit", "resnet") else "gpt2"), technique, steps=2)
    assert counts.leaks == [] and len(counts.masks) == 2
    masks = counts.masks[-1]
    for mask_name, mask in masks.items():
        assert_dense_blocks(technique, mask_name, mask)
        experts = len(mask) if technique.orders[mask_name].ndim == 2 else 1
        block = size * (mask[0, 0].numel() if experts == 1 else 1)
        if distribution == "uniform":
            assert abs(int(mask.sum()) - 0.25 * mask.numel()) <= block / 2 * experts
    total = sum(m.numel() for m in masks.values())
    assert sum(int(m.sum()) for m in masks.values()) / total == pytest.approx(0.25, abs=0.03)
    shapes = {len(m.shape) for m in masks.values()}
    assert shapes == ({4, 2} if name in ("vit",) else {4} if name == "resnet" else {2, 3} if "moe" in name else {2})


class Dense(Counts):
    """Also before there are masks: how many optimizer steps."""

    before = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        technique = next(c for c in trainer.callbacks if isinstance(c, BlockSparsity))
        if technique.masks:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        else:
            self.before += 1
            self.masks.append({})


def test_the_largest_blocks_of_the_trained_weights_stay_and_momenta_of_others_are_zero() -> None:
    torch.manual_seed(0)
    counts, technique = Dense(), BlockSparsity(sparsity=0.5, size=4, start=0.5)
    net = TinyGPT(2, dropout=0.0)
    trainer(counts, technique, max_steps=8).fit(net, loader("tiny_gpt", 32))
    assert counts.before == 4 and counts.leaks == [] and len(counts.masks) == 8
    assert all(torch.equal(counts.masks[4][name], mask) for name, mask in counts.masks[7].items())
    held = net.state_dict()
    for name, mask in technique.masks.items():
        assert not bool(held[name][~mask].any()) and bool(held[name][mask].all())
        assert int(mask.sum()) * 2 == mask.numel()
    assert "head.weight" not in technique.masks  # 61 rows
    assert technique.report()["blocks"] == sum(int(m.sum()) for m in technique.masks.values()) // 4


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_blocks_of_several_columns_are_those_with_the_largest_sums(name: str) -> None:
    torch.manual_seed(0)
    net: Any = family(name) if name == "resnet" else hugging_face(name, 2)
    start = {n: p.detach().clone() for n, p in net.named_parameters()}
    technique = BlockSparsity(0.5, size=2, columns=4, start=0.0, names=["*c_attn"] if name == "gpt2" else None)
    trainer(technique, max_steps=1).fit(
        net, DataLoader([make_batch("vit" if name == "resnet" else name)], batch_size=None)
    )  # pyright: ignore[reportArgumentType]
    assert technique.masks and technique.asked()["columns"] == 4 and "columns" not in BlockSparsity().asked()
    for n, mask in technique.masks.items():
        order, strips = technique.orders[n], start[n].abs().flatten(2).sum(2) if mask.ndim > 2 else start[n].abs()
        sums = strips[order].unflatten(0, (-1, 2)).unflatten(2, (-1, 4)).sum((1, 3))
        blocks = mask[order].unflatten(0, (-1, 2)).unflatten(2, (-1, 4)).transpose(1, 2).flatten(2)
        assert torch.equal(blocks.any(2), blocks.all(2))
        kept = blocks.all(2)
        assert int(kept.sum()) == max(round(0.5 * kept.numel()), 1) and float(sums[kept].min()) >= float(
            sums[~kept].max()
        )


def test_what_is_not_made_of_whole_groups() -> None:
    data = loader("classifier")
    with pytest.raises(
        ValueError,
        match=r"BlockSparsity\(size=8, columns=1\): 1 weights do not consist of whole blocks of .*, such as head",
    ):
        trainer(BlockSparsity(size=8, names=["head.*"]), max_steps=1).fit(TinyClassifier(), data)
    with pytest.raises(
        ValueError, match=r"size=16, columns=1\): 4 weights do not consist of whole blocks of .*, such as blocks.0.0"
    ):
        trainer(BlockSparsity(), max_steps=1).fit(TinyClassifier(), data)
    with pytest.raises(ValueError, match=r"size=4, columns=3\): 4 weights do not consist of whole blocks"):
        trainer(BlockSparsity(size=4, columns=3), max_steps=1).fit(TinyClassifier(), data)
    odd = TinyClassifier()
    odd.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 3))
    technique = BlockSparsity(size=8, start=0.0)
    trainer(technique, max_steps=1).fit(odd, data)
    assert [*technique.masks] == [f"blocks.{i}.0.weight" for i in range(3)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"sparsity": 1.0},
            r"BlockSparsity\(sparsity=1.0\): expected a number in \[0, 1\): the fraction of the masked weights",
        ),
        ({"columns": 0}, "columns=0.: expected an integer >= 1: the number of neighbouring columns"),
        ({"backend": "cuda"}, "expected 'auto', 'sparse' or 'dense'"),
        ({"size": 0}, "size=0.: expected an integer >= 1: the number of rows"),
        ({"start": 1.0}, r"start=1.0.: expected a number in \[0, 1\)"),
        ({"regroup": 1}, "regroup=1.: expected True or False"),
        ({"distribution": "er"}, "expected 'uniform' or 'erk'"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockSparsity(**settings)


def test_from_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "BlockSparsity", {"sparsity": 0.5, "size": 4, "start": 0.0}, max_steps=3)


def test_the_docstring_says_what_block_sparse_products_took_on_a_cpu() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "block_sparse_cpu.json").read_text())
    said = " ".join((BlockSparsity.__doc__ or "").split())
    low, high = ([row["ratio"]["median"] for row in results["rows"] if row["zeros"] == zeros] for zeros in (0.8, 0.95))
    assert f"took {min(low):.1f} to {max(low):.1f} times as long as a dense one at a sparsity of 0.8" in said
    assert f"and {min(high):.1f} to {max(high):.1f} times at 0.95" in said
