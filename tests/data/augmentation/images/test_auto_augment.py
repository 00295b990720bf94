"""AutoAugment: the published tables, one sub-policy to each image, and each operation with its own chance."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_eff as eff
from lightning_eff.data.augmentation.images import _policies
from lightning_eff.data.augmentation.images._operations import OPERATIONS, operated
from lightning_eff.data.augmentation.images._tables import TABLES
from lightning_eff.data.augmentation.images.auto_augment import auto_augment
from tests.cases import Case
from tests.data.augmentation.modules import ON_IMAGES, Own, batches, chi_squared, train, vit
from tests.runs import fit_yaml

pytest.importorskip("kornia")
_RANGE: Any = {"mean": 0.5, "std": 0.1}  # of numbers drawn from a normal distribution

CASES = {
    "AutoAugment": Case(
        active=lambda: eff.AutoAugment(policy="svhn", **_RANGE),
        neutral=lambda: eff.AutoAugment(prob=0.0),
        **ON_IMAGES,
    )
}

#: Of the paper's tables 9, 7 and 8, the first two sub-policies and the last, typed in from it.
PAPERS = {
    "imagenet": (
        (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
        (("solarize", 0.6, 5), ("auto_contrast", 0.6, None)),
        (("equalize", 0.8, None), ("equalize", 0.6, None)),
    ),
    "cifar10": (
        (("invert", 0.1, None), ("contrast", 0.2, 6)),
        (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
        (("translate_y", 0.7, 9), ("auto_contrast", 0.9, None)),
    ),
    "svhn": (
        (("shear_x", 0.9, 4), ("invert", 0.2, None)),
        (("shear_y", 0.9, 8), ("invert", 0.7, None)),
        (("shear_x", 0.7, 2), ("invert", 0.1, None)),
    ),
}


@pytest.mark.parametrize("policy", TABLES)
def test_tables_are_the_published_ones(policy: str) -> None:
    """By the paper where it is typed in here, and wholly by kornia's copy, which its AutoAugment runs."""
    from kornia.augmentation.auto.autoaugment import autoaugment as theirs

    table = [tuple(tuple(one) for one in sub) for sub in TABLES[policy]]
    assert (table[0], table[1], table[-1]) == PAPERS[policy]
    assert table == [tuple(sub) for sub in getattr(theirs, f"{policy}_policy")] and len(table) == 25
    for sub in TABLES[policy]:
        assert all(one.name in OPERATIONS and 0 <= one.p <= 1 and (one.level is None or one.level <= 9) for one in sub)


def drawn_by(policy: str, n: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    technique = eff.AutoAugment(policy=policy)
    names = tuple(technique.names)
    return *auto_augment(n, TABLES[policy], names, torch.Generator().manual_seed(0)), names


def test_each_sub_policy_is_as_likely_and_both_operations_are_of_one() -> None:
    """In a table whose operations tell which sub-policy they are of, and are always done."""
    names = list(OPERATIONS)[:10]
    table = [(TABLES["svhn"][0][0]._replace(name=names[2 * k], p=1.0),) for k in range(5)]
    both: Any = [(one[0], one[0]._replace(name=names[2 * k + 1])) for k, one in enumerate(table)]
    n = 5000
    which, _ = auto_augment(n, both, names, torch.Generator().manual_seed(0))
    assert torch.equal(which[:, 0] + 1, which[:, 1]) and bool((which[:, 0] % 2 == 0).all())
    assert chi_squared(torch.bincount(which[:, 0] // 2, minlength=5).double(), torch.full((5,), n / 5)) < 4


@pytest.mark.parametrize("policy", TABLES)
def test_operations_are_done_with_their_chances_and_strengths(policy: str) -> None:
    """How often each is done at each place: the mean of its chances over the table, by chi-squared; strengths are level / 9."""
    n = 20_000
    which, strength, names = drawn_by(policy, n)
    for slot in range(2):
        counts, expected = torch.zeros(2, len(names) + 1), torch.zeros(len(names) + 1)
        for sub in TABLES[policy]:
            expected[names.index(sub[slot].name)] += n / 25 * sub[slot].p
        expected[-1] = n - expected[:-1].sum()
        counts = torch.bincount(which[:, slot].where(which[:, slot] >= 0, len(names)), minlength=len(names) + 1)
        seen = expected > 0
        assert not counts[~seen].any()
        assert chi_squared(counts[seen].double(), expected[seen].double()) < 4
        for place, name in enumerate(names):
            got = {round(float(s) * 9) for s in strength[:, slot].abs()[which[:, slot] == place]}
            assert got == {one[slot].level or 0 for one in TABLES[policy] if one[slot].name == name and one[slot].p}
    signs = strength[:, 0][torch.tensor([OPERATIONS[name].signed for name in names])[which[:, 0]] & (which[:, 0] >= 0)]
    signs = signs[signs != 0]
    assert abs(int((signs < 0).sum()) - len(signs) / 2) < 4 * (len(signs) / 4) ** 0.5


def test_a_sub_policy_fires_as_a_whole_with_its_own_chances() -> None:
    """Of one sub-policy alone: neither, one, the other, both."""
    table = [TABLES["svhn"][0]]  # 0.9 and 0.2
    n = 4000
    which, _ = auto_augment(n, table, ("shear_x", "invert"), torch.Generator().manual_seed(0))
    kind = (which[:, 0] >= 0).long() * 2 + (which[:, 1] >= 0).long()
    expected = torch.tensor([0.1 * 0.8, 0.1 * 0.2, 0.9 * 0.8, 0.9 * 0.2]) * n
    assert chi_squared(torch.bincount(kind, minlength=4).float(), expected) < 4


def test_the_network_gets_what_the_operations_make(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[Tensor, Tensor, Any]] = []

    def spy(p: Tensor, names: Any, which: Tensor, strength: Tensor, fill: float) -> Tensor:
        done.append((which, strength, names))
        return operated(p, names, which, strength, fill)

    monkeypatch.setattr(_policies, "operated", spy)
    x, y = (torch.cat(parts) for parts in zip(*batches(8), strict=True))
    technique = eff.AutoAugment(policy="cifar10", **_RANGE)
    made = train(Own(F.cross_entropy), technique, data=[(x, y)]).given[-1][0]
    assert len(done) == 2, "two operations at most"
    for i, own in enumerate(x):
        p = own[None] * 0.1 + 0.5
        for which, strength, names in done:
            if which[i] >= 0:
                p = OPERATIONS[names[int(which[i])]].apply(p, strength[i : i + 1], 0.5).clamp(0, 1)
        torch.testing.assert_close(made[i], (p[0] - 0.5) / 0.1, rtol=0, atol=1e-4)
        if all(int(which[i]) < 0 for which, _, _ in done):
            assert torch.equal(made[i], own)
    idle = torch.stack([which < 0 for which, _, _ in done]).all(0)
    assert idle.any()
    assert technique.report()["share"] == pytest.approx(1 - float(idle.float().mean()))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ([[["flip", 0.5, 3], ["color", 1, 2]]], r"There is no operation 'flip'\. Operations are identity"),
        ([[["color", 0.5, 10], ["color", 1, 2]]], r"expected .* or a list of sub-policies, each two operations"),
        ([[["color", 1.5, 3], ["color", 1, 2]]], r"expected .* or a list of sub-policies"),
        ([[["color", 0.5, 3]]], r"expected .* or a list of sub-policies"),
        ([], r"policy=\[\]\): expected .* or a list of sub-policies"),
        ("none.json", r"policy='none.json'\): .* The file cannot be read: No such file"),
    ],
)
def test_policies_of_ones_own_are_checked(policy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^AutoAugment\((?s:.*){message}"):
        eff.AutoAugment(policy)


def test_other_channels_and_policies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^AutoAugment\(policy='places'\): expected 'imagenet', 'cifar10' or 'svhn'"):
        eff.AutoAugment(policy="places")
    x = torch.rand(6, 4, 8, 8)
    net = Own(F.cross_entropy)
    with pytest.raises(ValueError, match=r"4 channels, for which color is not defined. Use RandAugment\(operations"):
        train(net, eff.AutoAugment(), data=[(x, torch.arange(6) % 4)])


def test_hugging_face_models() -> None:
    net = train(vit(), eff.AutoAugment(policy="cifar10", **_RANGE), data=batches(2))
    assert not torch.equal(net.given[-1][0], batches(2)[1][0]) and torch.equal(net.given[-1][1], batches(2)[1][1])


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.data.augmentation.modules.ResNet", "data": "tests.data.augmentation.modules.Pictures"}
    fit_yaml(tmp_path, "AutoAugment", {"policy": "cifar10", "mean": 0.5, "std": 0.1}, max_steps=4, **names)
