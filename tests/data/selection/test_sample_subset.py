"""SampleSubset: what a file names is trained on and nothing else, in the user's order; other data sets' files are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_eff import ExactResume, SampleSubset
from lightning_eff.data.selection._offline.files import fingerprint, save
from lightning_eff.data.selection._subset import random_subset
from tests.cases import Case
from tests.data.selection.numbered import N, Numbered, run
from tests.runs import fit_yaml

CASES = {
    "SampleSubset": Case(
        active=lambda: SampleSubset(0.6), neutral=lambda: SampleSubset(1.0), anywhere=True, refuses_manual=False
    )
}
KEPT = [1, 4, 5, 9, 12, 16, 17, 22, 23, 29]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kept.json"
    save(path, num_samples=N, fingerprint=fingerprint(Numbered()), indices=KEPT)
    return path


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(Numbered(), 4),
    "shuffle": lambda: DataLoader(Numbered(), 4, shuffle=True),
    "drop_last": lambda: DataLoader(Numbered(), 4, shuffle=True, drop_last=True),
    "sampler": lambda: DataLoader(Numbered(), 4, sampler=RandomSampler(Numbered())),
    "batch sampler": lambda: DataLoader(
        Numbered(), batch_sampler=BatchSampler(RandomSampler(Numbered()), 4, drop_last=False)
    ),
    "workers": lambda: DataLoader(Numbered(), 4, shuffle=True, num_workers=2),
}


@pytest.mark.parametrize("kind", [*sorted(set(LOADERS) - {"workers"}), pytest.param("workers", marks=pytest.mark.slow)])
def test_each_epoch_has_the_files_samples_each_once(kind: str, file: Path) -> None:
    technique = SampleSubset(str(file))
    net = run(technique, LOADERS[kind](), max_epochs=3, max_steps=-1)
    per_epoch = 2 if kind == "drop_last" else 3
    epochs = [net._seen[i : i + per_epoch] for i in range(0, len(net._seen), per_epoch)]
    assert len(epochs) == 3
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [4, 4, 2][:per_epoch]
        drawn = [i for batch in epoch for i in batch]
        assert set(drawn) <= set(KEPT) and len(set(drawn)) == len(drawn) == (8 if kind == "drop_last" else 10)
    assert (net._seen[:3] == [KEPT[:4], KEPT[4:8], KEPT[8:]]) == (kind == "in order")
    assert (epochs[0] == epochs[1]) == (kind == "in order")
    assert technique.report() == {"samples": 10, "share": 1 / 3} and "10 of 30 samples" in technique.summary()


def test_the_order_is_that_of_the_users_sampler(file: Path) -> None:
    """What a plain run of the same seed has, without those left out."""
    plain = run(ExactResume(), max_epochs=2, max_steps=-1)
    net = run(SampleSubset(file), max_epochs=2, max_steps=-1)
    first = [i for batch in plain._seen[:8] for i in batch if i in KEPT]
    assert sorted(first) == KEPT != first
    generator = torch.Generator().manual_seed(4)
    weights = torch.tensor([5.0 if i in (4, 9) else 1.0 for i in range(N)])
    weighted = DataLoader(Numbered(), 4, sampler=WeightedRandomSampler(weights.tolist(), 3000, generator=generator))
    net = run(SampleSubset(file), weighted, max_epochs=1, max_steps=-1)
    counts = np.bincount([i for batch in net._seen for i in batch], minlength=N)
    assert set(np.flatnonzero(counts)) == set(KEPT)
    assert counts[[4, 9]].mean() / counts[[i for i in KEPT if i not in (4, 9)]].mean() == pytest.approx(5, rel=0.2)


def test_a_share_is_one_random_subset_for_the_whole_run() -> None:
    net = run(SampleSubset(0.35), max_epochs=4, max_steps=-1)
    epochs = [sorted(i for batch in net._seen[a : a + 3] for i in batch) for a in range(0, 12, 3)]
    assert len(net._seen) == 12 and len(set(epochs[0])) == 10 and all(epoch == epochs[0] for epoch in epochs)
    counts = torch.zeros(12)
    for seed in range(600):
        counts[random_subset(12, 4, torch.Generator().manual_seed(seed))] += 1
    assert ((counts / 600 - 4 / 12).abs() < 4.5 * (1 / 3 * 2 / 3 / 600) ** 0.5).all(), "as likely as each other"


def test_the_control_is_as_many_at_random(file: Path) -> None:
    recipe = SampleSubset(file)
    (arm,) = recipe.control.arms(recipe).values()
    assert isinstance(arm, SampleSubset) and arm.told is None
    net = run(arm, max_epochs=1, max_steps=-1)
    assert len(drawn := {i for batch in net._seen for i in batch}) == len(KEPT) and drawn != set(KEPT)
    assert recipe.control.arms(arm) == {} == recipe.control.arms(SampleSubset(1.0))


def test_resume_in_mid_epoch_is_bit_for_bit(file: Path, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = run([SampleSubset(file), saver], max_steps=8, enable_checkpointing=True)
    for step in (3, 4):
        resumed = run(SampleSubset(file), resume=tmp_path / f"step={step}.ckpt", max_steps=8)
        assert resumed._seen == whole._seen[step:]
        assert all(
            torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
        )


def test_files_of_each_form(tmp_path: Path) -> None:
    for path in (tmp_path / "a.json", tmp_path / "a.npz"):
        save(path, num_samples=N, fingerprint="", indices=KEPT[::-1])
        told = SampleSubset(path).told
        assert told is not None and told.values.tolist() == KEPT and told.num_samples == N and told.fingerprint == ""
        assert not list(tmp_path.glob(".*.part"))
    np.savez(tmp_path / "own.npz", indices=np.array([3, 0]), num_samples=5)
    own = SampleSubset(tmp_path / "own.npz").told
    assert own is not None and own.values.tolist() == [0, 3] and own.num_samples == 5


def test_a_fingerprint_follows_from_the_samples() -> None:
    found = fingerprint(Numbered())
    assert found == fingerprint(Numbered()) != fingerprint(Numbered(shift=1e-3)) and len(found) == 16
    assert fingerprint([{"a": [1, "x"], "b": b"y"}] * 3) != fingerprint([{"a": [1, "z"], "b": b"y"}] * 3)

    class Drawn(Numbered):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(2)

    assert fingerprint(Drawn()) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"num_samples": 30}, "holds num_samples; expected num_samples and indices, and optionally fingerprint"),
        ({"indices": [1]}, "holds indices; expected num_samples"),
        ({"num_samples": 0, "indices": [1]}, "got num_samples=0; expected an integer >= 1"),
        ({"num_samples": 30, "indices": []}, r"indices of shape \(0,\)"),
        ({"num_samples": 30, "indices": [1.5]}, "indices of type float64; expected integers"),
        ({"num_samples": 30, "indices": [[1], [2, 3]]}, "expected a row of numbers"),
        ({"num_samples": 30, "indices": [0, 30]}, r"between 0 and 30; expected all in \[0, 30\)"),
        ({"num_samples": 30, "indices": [-1, 3]}, "between -1 and 3"),
        ({"num_samples": 30, "indices": [3, 4, 3]}, "1 of 3 indices are repeated; expected each once"),
        ([1, 2], "holds a list; expected a mapping"),
    ],
)
def test_a_file_of_another_form_is_refused_at_construction(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"SampleSubset: .*file.json.*{message}"):
        SampleSubset(path)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (0.0, r"samples=0.0\): expected the path of a file of indices or a number in \(0, 1\]"),
        (1.5, r"samples=1.5\): expected"),
        (True, r"samples=True\): expected"),
        ("gone.json", "gone.json: there is no such file"),
        ("kept.csv", "kept.csv: expected a name that ends in .json or .npz"),
    ],
)
def test_bad_arguments(samples: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"SampleSubset.*{message}"):
        SampleSubset(samples)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(Numbered(29), 4), "belongs to a data set of 30 samples, but the training data set has 29"),
        (DataLoader(Numbered(shift=0.5), 4), "with the fingerprint .*, but the training data set has"),
        (
            DataLoader(Numbered(), 4, sampler=SubsetRandomSampler([0, 2, 3, 6])),
            "yields 4 samples in epoch 0, but none of the",
        ),
    ],
)
def test_a_file_of_another_data_set_is_refused_before_the_first_step(data: Any, message: str, file: Path) -> None:
    nets: list[Any] = []
    with pytest.raises(ValueError, match=message):
        from tests.data.selection.numbered import Net

        nets.append(Net())
        run(SampleSubset(file), data, net=nets[0])
    assert not nets[0]._seen


def test_the_command_line_runs_it(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    save(path, num_samples=20, fingerprint="", indices=[*range(8)])
    fit_yaml(tmp_path, "SampleSubset", {"samples": str(path)}, max_steps=5)
