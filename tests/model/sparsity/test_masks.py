"""Masks of all kinds in two processes: those of one process with all the samples, on every rank, after every step."""

from tests.model.sparsity.masks_jobs import TECHNIQUES, run
from tests.model.sparsity.sparse import flat_mask
from tests.strategies.launch import launch

STEPS = 4


def test_two_processes_have_the_masks_of_one_with_all_samples() -> None:
    """Scores are sums over ranks in another order, so that a few that are nearly equal may change places."""
    found = launch("tests.model.sparsity.masks_jobs", "together", STEPS, world_size=2)
    for name, build in TECHNIQUES.items():
        one, (first, second) = run(build(), None, STEPS), found[name]
        assert first["leaks"] == second["leaks"] == one.leaks == []
        assert first["masks"] == second["masks"], f"{name}: ranks have other masks"
        alone = [flat_mask(masks).int().tolist() for masks in one.masks]
        for ours, theirs in zip(first["masks"], alone, strict=True):
            assert sum(ours) == sum(theirs)
            assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 2, name


def test_ranks_have_the_same_masks_and_weights_of_a_gan() -> None:
    for name, (first, second) in launch("tests.model.sparsity.masks_jobs", "gans", world_size=2).items():
        assert first["leaks"] == second["leaks"] == [], name
        assert first["masks"] == second["masks"], name
        assert 0 < sum(first["masks"]) < len(first["masks"]), name
        assert first["weights"] == second["weights"], name
