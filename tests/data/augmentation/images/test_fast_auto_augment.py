"""fast_auto_augment: scores as probability theory has them, the best candidates together, and no trace."""

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_eff as eff
from lightning_eff.data.augmentation.images.auto_augment import draw_policy
from tests.data.augmentation.modules import ResNet, batches, chi_squared

pytest.importorskip("kornia")


class Brightness(pl.LightningModule):
    """Its metric is the mean of the images' pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("brightness", batch[0].mean(), batch_size=len(batch[0]))


def loader(count: int = 2000, value: float = 0.9) -> list[Any]:
    return [(torch.full((count // 4, 1, 4, 4), value), torch.zeros(count // 4)) for _ in range(4)]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_scores_are_those_of_inversions_by_chance_and_the_best_make_the_policy(mode: Any) -> None:
    """An image of 0.9 becomes 0.1 if exactly one of two inversions is done: with p (1 - q) + q (1 - p)."""
    n, size = 2000, 2
    found = eff.fast_auto_augment(
        Brightness(), loader(n), metric="brightness", mode=mode, trials=12, size=size, keep=12, operations=["invert"]
    )
    assert found.score == pytest.approx(0.9) and sorted(found.best) == [*range(12)]
    candidates = [found.policy[size * k : size * (k + 1)] for k in range(12)]
    for trial, candidate in zip(found.best, candidates, strict=True):
        odd = sum(one.p * (1 - two.p) + two.p * (1 - one.p) for one, two in candidate) / size
        assert abs(found.scores[trial] - (0.9 - 0.8 * odd)) < 4 * 0.8 * (odd * (1 - odd) / n) ** 0.5 + 1e-5
    ordered = [found.scores[trial] for trial in found.best]
    assert ordered == sorted(found.scores, reverse=mode == "max") and len(set(ordered)) == 12
    few = eff.fast_auto_augment(
        Brightness(), loader(n), metric="brightness", mode=mode, trials=12, size=size, keep=3, operations=["invert"]
    )
    assert few.policy == found.policy[:6] and few.best == found.best[:3]


def test_candidates_are_drawn_evenly() -> None:
    names = ["invert", "rotate", "color"]
    drawn = draw_policy(3000, names, torch.Generator().manual_seed(0))
    both = torch.tensor([names.index(a.name) * 3 + names.index(b.name) for a, b in drawn])
    assert chi_squared(torch.bincount(both, minlength=9).double(), torch.full((9,), 3000 / 9).double()) < 4
    for values, top in (
        ([one.p for sub in drawn for one in sub], 1.0),
        ([one.level for sub in drawn for one in sub], 9.0),
    ):
        numbers = torch.tensor(values) / top
        assert bool(((numbers >= 0) & (numbers <= 1)).all())
        counts = torch.histc(numbers, 5, 0, 1)  # rounding moves some across the borders of five equal parts
        assert (
            abs(float(numbers.mean()) - 0.5) < 4 / (12 * 6000) ** 0.5 and float((counts / 1200 - 1).abs().max()) < 0.15
        )


def test_a_search_repeats_by_its_seed_and_leaves_no_trace() -> None:
    net, data = ResNet(), batches(2)
    net.train()
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()

    def search(seed: int) -> Any:
        return eff.fast_auto_augment(net, data, trials=3, size=2, keep=1, seed=seed, mean=0.5, std=0.1)

    first, second, other = search(0), search(0), search(1)
    assert first == second and first.policy != other.policy and len(first.policy) == 2
    assert torch.equal(torch.get_rng_state(), state) and net.training
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_autoaugment_takes_the_result_and_its_file(tmp_path: Path) -> None:
    found = eff.fast_auto_augment(Brightness(), loader(40), metric="brightness", trials=2, size=3, keep=2)
    found.save(tmp_path / "policy.json")
    technique = eff.AutoAugment(tmp_path / "policy.json")
    x = torch.rand(50, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    made = [
        policy.changed((x,), torch.Generator().manual_seed(3))[0][0]
        for policy in (technique, eff.AutoAugment(str(tmp_path / "policy.json")), eff.AutoAugment(found.policy))
    ]
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(made)) and not torch.equal(made[0], x)
    inverted = eff.AutoAugment([[["invert", 1, None], ["identity", 0.5, None]]])
    torch.testing.assert_close(inverted.changed((x,), torch.Generator())[0][0], 1 - x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "val_acc"}, r"metric='val_acc'\): validation logged brightness\. Name one of"),
        ({"mode": "least"}, r"mode='least'\): expected 'min' or 'max'"),
        ({"trials": 0}, r"trials=0\): expected an integer >= 1"),
        ({"trials": 2, "keep": 3}, r"keep=3\): expected an integer in \[1, 2\]"),
        ({"operations": ["mixup"]}, r"operations=\['mixup'\]\): expected a list of some of 'identity'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^fast_auto_augment\({message}"):
        eff.fast_auto_augment(Brightness(), loader(8), **{"metric": "brightness", **arguments})


def test_several_processes_and_images_out_of_range_are_refused() -> None:
    class Two(pl.Trainer):
        world_size = 2

    with pytest.raises(ValueError, match=r"fast_auto_augment\(trainer=...\): the Trainer has 2 processes"):
        eff.fast_auto_augment(Brightness(), loader(8), trainer=Two(logger=False, enable_checkpointing=False))
    with pytest.raises(ValueError, match=r"AutoAugment\(.* and not within 0 to 1"):
        eff.fast_auto_augment(Brightness(), loader(8, 3.0), metric="brightness", trials=2, keep=1)
