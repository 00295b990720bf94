"""Co-Mixup: labellings and their energy beside all that there are, blocks by saliency alone, shares that are pixels'."""

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_eff as eff
from lightning_eff.data.augmentation.mixing.several._grids import Weights, energy, least, potts, together
from lightning_eff.data.augmentation.mixing.several.co_mixup import (
    block_saliency,
    compatibility,
    in_places,
    shares,
    sources,
)
from lightning_eff.data.selection import selective_backprop
from tests.cases import Case
from tests.data.augmentation.modules import (
    LOSSES,
    ON_IMAGES,
    SIDE,
    SIZE,
    Own,
    ResNet,
    Spied,
    batches,
    check_exact,
    conv_next,
    train,
    vit,
)
from tests.runs import fit_yaml

CASES = {
    "CoMixup": Case(
        active=lambda: eff.CoMixup(),
        neutral=lambda: eff.CoMixup(prob=0.0),
        **ON_IMAGES,
    )
}


# -- labellings


def written_out(grids: Any, cost: Any, rows: int, compatible: Any, weights: Weights) -> float:
    """The energy, block by block."""
    total, n = 0.0, cost.shape[1]
    m, columns = len(cost), n // rows
    for j, grid in enumerate(grids):
        z = np.asarray(grid).reshape(rows, columns)
        for r in range(rows):
            for c in range(columns):
                total += cost[z[r, c], r * columns + c]
                total += (
                    weights.beta
                    / n
                    * sum(z[r, c] != z[a, b] for a, b in ((r + 1, c), (r, c + 1)) if a < rows and b < columns)
                )
        for i in range(m):
            taken = sum(
                compatible[i][k] * sum(int(v == k) for other, one in enumerate(grids) if other != j for v in one)
                for k in range(m)
            )
            if taken > weights.tau * n:
                total += weights.gamma / n * taken * sum(int(v == i) for v in grid)
    return total


def all_of(inputs: int, blocks: int) -> Any:
    return (np.array(z) for z in itertools.product(range(inputs), repeat=blocks))


@pytest.mark.parametrize(
    ("inputs", "rows", "columns"), [(2, 3, 3), (2, 4, 2), (2, 1, 7), (3, 2, 3), (3, 2, 2), (4, 2, 2)]
)
def test_a_labelling_is_the_best_of_all_of_two_labels_and_hardly_less_of_more(
    inputs: int, rows: int, columns: int
) -> None:
    rng, n, missed = np.random.default_rng(rows + columns), rows * columns, []
    for k in range(30):
        cost, beta = rng.exponential(size=(inputs, n)), (0.1, 0.4, 1.0)[k % 3]
        found = potts(cost, rows, beta, least(cost, rows, beta))
        everywhere = [potts(cost, rows, beta, z) for z in all_of(inputs, n)]
        assert found <= potts(cost, rows, beta, cost.argmin(axis=0))
        missed.append(found / min(everywhere) - 1)
    assert min(missed) > -1e-9
    assert max(missed) < (1e-9 if inputs == 2 else 0.05), "twice is what expansions promise of more"
    assert sum(miss < 1e-9 for miss in missed) >= 28


def test_expansions_of_large_grids_are_those_of_a_minimum_cut() -> None:
    """With two labels the least energy is that of a cut, here by networkx."""
    networkx = pytest.importorskip("networkx")
    rng = np.random.default_rng(1)
    for rows in (4, 6):
        n = rows * rows
        for _ in range(3):
            cost, beta = rng.integers(0, 100, (2, n)), 30
            graph = networkx.DiGraph()
            for k in range(n):
                graph.add_edge("s", k, capacity=int(cost[1, k]))  # cut where the block has label 1
                graph.add_edge(k, "t", capacity=int(cost[0, k]))
                for other in [k + 1] * (k % rows < rows - 1) + [k + rows] * (k + rows < n):
                    graph.add_edge(k, other, capacity=beta)
                    graph.add_edge(other, k, capacity=beta)
            expected = networkx.maximum_flow_value(graph, "s", "t")
            # four labels more that cost too much change nothing
            more = np.concatenate([cost, np.full((4, n), 1000)]).astype(float)
            assert potts(more, rows, beta, least(more, rows, beta)) == pytest.approx(expected, abs=1e-6)


def parts(inputs: int, blocks: int, rng: np.random.Generator) -> tuple[Any, Any]:
    saliency = rng.exponential(size=(inputs, blocks))
    away = np.triu(rng.uniform(size=(inputs, inputs)), 1)
    away += away.T
    compatible = 0.95 * np.eye(inputs) + 0.05 * away / away.sum() * inputs
    return saliency / saliency.sum(axis=1, keepdims=True), compatible


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows", "columns", "tau", "exact"),
    [(2, 2, 2, 2, 0.83, 10), (3, 2, 2, 2, 0.83, 5), (2, 2, 2, 2, 0.0, 7), (2, 3, 1, 3, 0.0, 10), (3, 3, 1, 2, 0.83, 2)],
)
def test_energy_is_below_that_of_saliency_alone_and_often_the_least(
    inputs: int, outputs: int, rows: int, columns: int, tau: float, exact: int
) -> None:
    """Of 10 draws, or 5, so many are the best of all grids that there are; the others stay in a minimum of their own."""
    rng, n, best, gained = np.random.default_rng(7), rows * columns, 0, 0.0
    everywhere = [z.reshape(outputs, n) for z in all_of(inputs, outputs * n)]
    weights = Weights(0.32, 1.0, tau)
    for _ in range(10 if len(everywhere) < 5000 else 5):
        saliency, compatible = parts(inputs, n, rng)
        start = rng.integers(0, inputs, (outputs, n))
        found = together(-saliency, rows, compatible, weights, start, 4)
        value = energy(found, -saliency, rows, compatible, weights)
        assert value == pytest.approx(written_out(found, -saliency, rows, compatible, weights), abs=1e-9)
        alone = np.broadcast_to(saliency.argmax(axis=0), (outputs, n))
        before = written_out(alone, -saliency, rows, compatible, weights)
        assert value <= before + 1e-9
        gained += before - value
        lowest = min(energy(z, -saliency, rows, compatible, weights) for z in everywhere)
        assert value >= lowest - 1e-9
        best += value < lowest + 1e-9
    assert best >= exact and gained > 0


def test_each_output_is_the_best_beside_the_others() -> None:
    """Without a threshold, where one iteration ends: none of the outputs is better alone."""
    rng, weights = np.random.default_rng(3), Weights(0.32, 1.0, 0.0)
    for _ in range(5):
        saliency, compatible = parts(2, 4, rng)
        found = together(-saliency, 2, compatible, weights, rng.integers(0, 2, (3, 4)), 20)
        value = written_out(found, -saliency, 2, compatible, weights)
        for j in range(3):
            for z in all_of(2, 4):
                other = found.copy()
                other[j] = z
                assert written_out(other, -saliency, 2, compatible, weights) >= value - 1e-9


@pytest.mark.parametrize(("blocks", "side"), [(4, (8, 8)), (3, (9, 12)), (2, (5, 7))])
def test_without_other_terms_each_block_is_of_the_most_salient_image(blocks: int, side: tuple[int, int]) -> None:
    """Block by block, of maps that all sum to 1."""
    g = torch.Generator().manual_seed(0)
    maps = torch.rand(5, *side, generator=g).square() * torch.rand(5, 1, 1, generator=g)
    one = eff.CoMixup(blocks=blocks, beta=0.0, gamma=0.0, eta=0.0)
    pixels = one._sources_of(maps, np.random.default_rng(0))
    height, width = side
    if height % blocks == 0 and width % blocks == 0:
        for a in range(blocks):
            for b in range(blocks):
                rows = slice(a * height // blocks, (a + 1) * height // blocks)
                columns = slice(b * width // blocks, (b + 1) * width // blocks)
                expected = int((maps[:, rows, columns].sum((1, 2)) / maps.sum((1, 2))).argmax())
                assert bool((pixels[:, rows, columns] == expected).all())
    assert bool((pixels == pixels[:1]).all()), "all are the same one"
    different = eff.CoMixup(blocks=blocks, beta=0.0, eta=0.0)._sources_of(maps, np.random.default_rng(0))
    assert not bool((different == different[:1]).all())


def test_what_costs_more_is_taken_less() -> None:
    """Borders become fewer by beta, and no image is taken much more than others by gamma."""
    rng, borders = np.random.default_rng(0), []
    saliency, _ = parts(20, 16, rng)
    for beta in (0.0, 0.32, 2.0):
        z = sources(
            saliency, np.eye(20), Weights(beta, 1.0, 0.83), eta=0.05, alpha=2.0, rounds=4, rng=np.random.default_rng(1)
        ).reshape(20, 4, 4)
        borders.append(int((z[:, 1:] != z[:, :-1]).sum() + (z[:, :, 1:] != z[:, :, :-1]).sum()))
        taken = np.bincount(z.ravel(), minlength=20)
        assert taken.max() <= 2 * 16 and (taken > 0).sum() > 12
    assert borders[0] > borders[1] > borders[2]
    favoured = Weights(0.0, 0.0, 0.83)
    share = np.random.default_rng(4).dirichlet(np.full(20, 0.3))
    z = sources(saliency, np.eye(20), favoured, eta=50.0, alpha=0.3, rounds=1, rng=np.random.default_rng(4))
    assert (z == share.argmax()).all(), "the prior alone"


# -- what is made of maps


def test_saliency_of_blocks_sums_to_one_and_nothing_is_even() -> None:
    maps = torch.rand(4, 8, 8)
    maps[1], maps[2, 0, 0] = 0, float("inf")
    found = block_saliency(maps, 4)
    torch.testing.assert_close(found.sum(1), torch.ones(4).double())
    expected = F.avg_pool2d(maps[:1, None].double(), 2).flatten() / maps[0].double().mean() / 16
    torch.testing.assert_close(found[0], expected)
    assert bool((found[1:3] == 1 / 16).all())


def test_distances_are_those_of_the_most_salient_places() -> None:
    maps = torch.zeros(3, 8, 8)
    for k, (row, column) in enumerate(((0, 0), (4, 2), (6, 6))):
        maps[k, row : row + 2, column : column + 2] = 1.0
    found = compatibility(maps, 4, 0.1)
    away = torch.tensor([[0.0, 6, 12], [6, 0, 6], [12, 6, 0]])
    torch.testing.assert_close(found.float(), 0.9 * torch.eye(3) + 0.1 * away / away.sum() * 3)
    assert torch.equal(compatibility(torch.ones(3, 8, 8), 4, 0.1), 0.9 * torch.eye(3).double())


def test_outputs_stand_where_they_have_most() -> None:
    outputs = np.array([[2, 2, 2, 1], [0, 1, 1, 1], [1, 1, 2, 2]])
    assert in_places(outputs).tolist() == [[1, 1, 2, 2], [0, 1, 1, 1], [2, 2, 2, 1]]


def test_shares_are_the_parts_of_pixels() -> None:
    source = torch.tensor([[[1, 1], [1, 0]], [[1, 1], [1, 1]], [[0, 3], [3, 1]], [[1, 1], [0, 2]]])
    partner, share = shares(source)
    expected = torch.tensor([[0.25, 0.75, 0, 0], [1, 0, 0, 0], [0, 0.5, 0.25, 0.25], [0, 0.5, 0.25, 0.25]])
    assert torch.equal(share, expected) and partner[:, 0].tolist() == [1, 1, 3, 1]
    for k in range(4):
        by_source = torch.zeros(4).index_add(0, torch.tensor([k, *partner[k].tolist()]), share[k])
        assert torch.equal(by_source, torch.bincount(source[k].flatten(), minlength=4) / 4)


# -- in training


@pytest.mark.parametrize("settings", [{}, {"part": 4, "beta": 0.0}, {"blocks": 3, "beta": 0.0}, {"blocks": 8}], ids=str)
def test_in_training_each_pixel_is_of_one_image_and_labels_go_by_pixels(settings: Any) -> None:
    one, data = eff.CoMixup(**settings), batches(8)
    spied = Spied(one)
    net = train(Own(F.cross_entropy), one, data=data)
    several = 0
    assert len(spied.shares) == 8
    for (x, y), (own, labels), partner, share in zip(net.given[-8:], data, spied.partners, spied.shares, strict=True):
        assert torch.equal(y, labels) and partner.shape == (SIZE, share.shape[1] - 1)
        same = (x[:, None] == own[None]).all(2)  # (made, source, H, W)
        assert bool((same.sum(1) == 1).all()), "each pixel is of one image"
        torch.testing.assert_close(share.sum(1), torch.ones(SIZE))
        who = torch.cat([torch.arange(SIZE)[:, None], partner], dim=1)
        by_source = torch.zeros(SIZE, SIZE).scatter_add(1, who, share)
        torch.testing.assert_close(by_source, same.float().mean((2, 3)))
        several += int((share > 0).sum(1).max() > 2)
        if "part" in settings:
            assert not bool(by_source[:4, 4:].any() | by_source[4:, :4].any())
    assert several > 2, "of more than two"
    report = one.report()
    assert report["sources"] == pytest.approx(float((spied.shares[-1] > 0).sum(1).float().mean()))
    assert report["share"] == pytest.approx(1 - float(spied.shares[-1][:, 0].mean()))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_on_mixed_targets(name: str) -> None:
    loss, soft = LOSSES[name]
    check_exact(Own(loss), eff.CoMixup(), soft, larger_first=False)


@pytest.mark.parametrize("build", [ResNet, vit, conv_next], ids=["resnet", "vit", "convnext"])
def test_modules_with_integer_labels(build: Any) -> None:
    check_exact(build(), eff.CoMixup(), LOSSES["cross-entropy"][1], larger_first=False)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "rows"])
@pytest.mark.parametrize("clean", [1.0, 0.3])
def test_the_clean_loss_is_added_to_that_of_the_mixtures(name: str, clean: float) -> None:
    """Loss and gradient, beside the module's own loss on the images and the one on mixed targets, each in its own pass."""
    loss, soft = LOSSES[name]
    data, found = batches(), list[Tensor]()
    net, twin, technique = Own(loss), Own(loss), eff.CoMixup(clean=clean)
    spied = Spied(technique)

    class Gradient(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            found.append(torch.cat([p.grad.flatten() for p in module.parameters()]).clone())

    train(net, technique, Gradient(), data=data)
    (both, labels), (x, y) = net.given[-1], data[0]
    assert torch.equal(both[:SIZE], x) and torch.equal(labels, y.repeat(2)) and not torch.equal(both[SIZE:], x)
    expected = soft(twin(both[SIZE:]), spied.targets(0, y)) + clean * loss(twin(x), y)
    expected.backward()
    assert net.losses[-1] == pytest.approx(expected.item(), rel=1e-5)
    grads = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    torch.testing.assert_close(found[0], grads, rtol=1e-4, atol=1e-6)


def test_with_class_weights_both_means_are_divided_by_their_own_weights() -> None:
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0])
    net, technique = Own(lambda z, y: F.cross_entropy(z, y, weight=weight)), eff.CoMixup(clean=1.0)
    spied, twin = Spied(technique), Own(F.cross_entropy)
    train(net, technique)
    both, y = net.given[-1][0], batches()[0][1]
    z, share = twin(both), spied.shares[0]
    columns = [y, *y[spied.partners[0]].unbind(1)]
    rows = [F.cross_entropy(z[SIZE:], t, weight=weight, reduction="none") for t in columns]
    mixtures = [(share[:, k] * row).sum() / weight[columns[k]].sum() for k, row in enumerate(rows)]
    expected = torch.stack(mixtures).sum() + F.cross_entropy(z[:SIZE], y, weight=weight)
    assert net.losses[-1] == pytest.approx(expected.item(), rel=1e-5)


def test_what_the_clean_loss_cannot_be_told_from_is_refused() -> None:
    with pytest.raises(ValueError, match=r"CoMixup\(clean=1\): .*reduction='none', .* Use a mean or sum"):
        train(Own(LOSSES["rows"][0]), eff.CoMixup(clean=1.0))
    with pytest.raises(ValueError, match=r"CoMixup\(clean=1\): SelectiveBackprop changes .* Set clean=0"):
        train(Own(F.cross_entropy), eff.CoMixup(clean=1.0), eff.SelectiveBackprop())


def test_saliency_is_the_losss_gradient_and_is_counted() -> None:
    x, y = batches()[0]
    found: list[Tensor] = []

    class Looks(eff.CoMixup):
        def _sources_of(self, maps: Tensor, rng: np.random.Generator) -> Tensor:
            found.append(maps)
            return super()._sources_of(maps, rng)

    technique = Looks()
    cost: list[Any] = []

    class Cost(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            cost.append(dict(technique.session.chain.cost.__dict__))

    twin = ResNet()
    train(ResNet(), technique, Cost(), data=[(x, y)] * 3)
    leaf = x.clone().requires_grad_()
    F.cross_entropy(twin(leaf), y).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(found[0], leaf.grad.square().mean(1).sqrt(), rtol=1e-4, atol=1e-8)
    # in the first batch four that look for labels and one that looks at the gradient; and one of each step
    assert [c["forward_passes"] for c in cost] == [6, 7, 8] and [c["backward_passes"] for c in cost] == [2, 3, 4]
    assert technique.report()["milliseconds"] > 0


def test_what_chooses_samples_scores_mixtures_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[Tensor] = []
    probabilities = selective_backprop.keep_probabilities

    def spy(losses: Tensor, history: Tensor, *, beta: float) -> Tensor:
        scored.append(losses)
        return probabilities(losses, history, beta=beta)

    monkeypatch.setattr(selective_backprop, "keep_probabilities", spy)
    one, (_, y) = eff.CoMixup(), batches()[0]
    spied = Spied(one)
    pl.seed_everything(0, verbose=False)
    made = train(Own(F.cross_entropy), eff.CoMixup()).given[-1][0]
    pl.seed_everything(0, verbose=False)
    net = train(Own(F.cross_entropy), one, eff.SelectiveBackprop(keep=0.5))
    rows = -(spied.targets(0, y) * Own(F.cross_entropy)(made).log_softmax(-1)).sum(-1).detach()
    torch.testing.assert_close(scored[0].float(), rows, rtol=1e-5, atol=1e-6)
    chosen = [int((made == image).flatten(1).all(1).nonzero()[0]) for image in net.given[-1][0]]
    assert len(chosen) == SIZE // 2
    assert net.losses[-1] == pytest.approx(rows[chosen].mean().item(), rel=1e-5)


def test_a_metric_is_told_which_labels_it_reads() -> None:
    accuracies: list[Tensor] = []

    def loss(z: Tensor, y: Tensor) -> Tensor:
        accuracies.append((z.argmax(-1) == y).float().mean())
        return F.cross_entropy(z, y)

    net = Own(loss)
    with pytest.warns(UserWarning, match=r"CoMixup: training_step compares .* is not always the larger"):
        train(net, eff.CoMixup())


def test_what_has_no_gradient_or_too_few_pixels_is_refused_before_any_weight_changes() -> None:
    class Rounds(Own):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.detach())

    few = [(torch.randn(SIZE, 1, 3, SIDE), torch.zeros(SIZE).long())]
    for net, data, message in (
        (Rounds(F.cross_entropy), None, "the loss has no gradient with respect to the images"),
        (Own(F.cross_entropy), few, r"\(blocks=4\): images of 3 x 8 pixels have fewer pixels than blocks"),
    ):
        before = [p.clone() for p in net.parameters()]
        with pytest.raises(ValueError, match=f"CoMixup.*{message}"):
            train(net, eff.CoMixup(), data=data)
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"part": 1}, r"part=1\): expected an integer >= 2"),
        ({"blocks": 9}, r"blocks=9\): expected an integer in \[2, 8\]"),
        ({"rounds": 0}, r"rounds=0\): expected an integer >= 1"),
        ({"alpha": 0}, r"alpha=0\): expected a finite number > 0"),
        ({"beta": -1}, r"beta=-1\): expected a finite number >= 0"),
        ({"clean": -1}, r"clean=-1\): expected a finite number >= 0"),
        ({"omega": 2}, r"omega=2\): expected a number in \[0, 1\]"),
    ],
)
def test_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^CoMixup\({message}"):
        eff.CoMixup(**arguments)


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.data.augmentation.modules.ResNet", "data": "tests.data.augmentation.modules.Pictures"}
    fit_yaml(tmp_path, "CoMixup", {"part": 3, "blocks": 2, "tau": 0.5}, max_steps=4, **names)
