"""Which blocks ``layers=`` means, and which are found without it, where a module keeps them in no list."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff import (
    LayerFreezing,
    ProgressiveStacking,
    Rematerialization,
    StochasticDepth,
)
from lightning_eff._core._branches.side_by_side import side_by_side
from lightning_eff._core.blocks import find_stack, find_stages, refuse_compiled_around
from tests.core.elsewhere import Elsewhere, Numbered
from tests.core.test_blocks import Holds, Residual, repeat
from tests.core.test_stacks import Adds, D, Network, fit
from tests.models import TinyGPT


def attributes(start: str, blocks: Any, first: int = 0) -> dict[str, nn.Module]:
    return {f"{start}{i + first}": block for i, block in enumerate(blocks)}


FORMS = [
    (None, "block_*"),
    ("block_*", "block_*"),
    ("block_[0-9]", "block_*"),
    ("block_?", "block_*"),
    ("block_0, block_1, block_2, block_3", "block_*"),
    (["block_0", "block_1", "block_2", "block_3"], "block_*"),
    (["block_[01]", "block_2", "block_3"], "block_*"),
    (("block_1", "block_2"), "block_1, block_2"),
    ("block_[12]", "block_1, block_2"),
    (["block_1", "block_0"], "block_1, block_0"),
]


@pytest.mark.parametrize(("layers", "path"), FORMS)
def test_attributes_are_found_by_patterns_and_paths(layers: Any, path: str) -> None:
    net = Elsewhere("attributes")
    for found in (find_stack(net, layers, who="It"), *find_stages(net, layers, who="It")):
        assert found.path == path
        assert [*found.named_blocks] == (path.split(", ") if "*" not in path else [f"block_{i}" for i in range(4)])
        assert find_stack(net, found.path, who="It").named_blocks == found.named_blocks, "a path finds the same again"


@pytest.mark.parametrize(
    ("layers", "path"),
    [
        ("blocks.*", "blocks"),
        (["blocks.0", "blocks.1", "blocks.2", "blocks.3"], "blocks"),
        (["blocks"], "blocks"),
        ("blocks.[12]", "blocks.1, blocks.2"),
    ],
)
def test_all_blocks_of_a_list_are_that_list(layers: Any, path: str) -> None:
    assert find_stack(TinyGPT(), layers, who="It").path == path
    assert [found.path for found in find_stages(TinyGPT(), layers, who="It")] == [path]


def test_numbers_are_put_in_order() -> None:
    net = Holds(**{f"block{i}": Residual() for i in (10, 2, 1, 11)})
    assert [*find_stack(net, None, who="It").named_blocks] == ["block1", "block2", "block10", "block11"]


def test_a_pattern_that_means_more_than_the_blocks_is_made_narrower() -> None:
    net = Holds(**attributes("block_", repeat(3)), block_norm=nn.LayerNorm(4))
    found = find_stack(net, None, who="It")
    assert (found.path, found.length) == ("block_[0-9]*", 3)
    with pytest.raises(ValueError, match=r"several classes \(LayerNorm, Residual\).*such as layers='block_\[0-9\]\*'"):
        find_stack(net, "block_*", who="It")


def test_a_dict_is_taken_as_a_whole() -> None:
    net = Holds(stages=nn.ModuleDict({"b": Residual(), "a": Residual()}))
    assert [*find_stack(net, None, who="It").named_blocks] == ["stages.b", "stages.a"]
    assert find_stack(net, "stages", who="It").path == find_stack(net, "stages.*", who="It").path == "stages"


def test_two_lists_are_one_stack_where_both_are_named() -> None:
    net = Elsewhere("two halves")
    assert [*find_stack(net, ["lower", "upper"], who="It").named_blocks] == ["lower.0", "lower.1", "upper.0", "upper.1"]
    assert [*find_stack(net, "*er.*", who="It").named_blocks] == ["lower.0", "lower.1", "upper.0", "upper.1"]
    assert [found.path for found in find_stages(net, ["lower", "upper"], who="It")] == ["lower", "upper"]
    assert [found.path for found in find_stages(net, "*er", who="It")] == ["lower", "upper"]


class Stage(nn.Module):
    def __init__(self, length: int = 2) -> None:
        super().__init__()
        self.blocks, self.down = repeat(length), nn.Linear(4, 4)


def test_a_list_within_the_blocks_is_not_meant() -> None:
    net = Holds(**attributes("block_", [Stage() for _ in range(4)]))
    assert find_stack(net, None, who="It").path == "block_*"
    unlike = Holds(**attributes("tower", [Stage(2), Stage(5)]))
    assert find_stack(unlike, None, who="It").path == "tower1.blocks", "of unequal towers the longest list"


def test_stages_that_consist_of_lists_stay_their_blocks() -> None:
    net = Holds(**attributes("layer", [nn.Sequential(*repeat(3)) for _ in range(4)], 1))
    assert [found.path for found in find_stages(net, None, who="It")] == [f"layer{i}" for i in range(1, 5)]
    assert find_stack(net, None, who="It").path == "layer*"
    assert [found.path for found in find_stages(net, "layer*", who="It")] == ["layer*"]


def test_lists_go_before_names_of_the_same_length() -> None:
    net = Holds(**attributes("tower", repeat(3)), blocks=repeat(3))
    assert find_stack(net, None, who="It").path == "blocks"
    twice = Holds(**attributes("down_", repeat(3)), **attributes("up_", repeat(3)))
    with pytest.raises(
        ValueError, match=r"2 stacks .* equally long: 'down_\*' \(3 x Residual\), 'up_\*'.*layers='down_\*'"
    ):
        find_stack(twice, None, who="It")


def test_layers_and_unequal_modules_are_not_called_blocks() -> None:
    for net in (
        Holds(**attributes("fc", [nn.Linear(4, 4) for _ in range(4)])),
        Holds(**attributes("down", [Residual(4), Residual(8), Residual(16)])),
        Holds(block_0=Residual(), other=Residual()),
    ):
        with pytest.raises(ValueError, match=r"found no stack of repeated blocks.*It\(layers='block_\*'\)"):
            find_stack(net, None, who="It")
    net = Holds(**attributes("fc", [nn.Linear(4, 4) for _ in range(4)]))
    assert find_stack(net, "fc*", who="It").length == 4, "but can be named"


ERRORS = [
    (
        "blok_*",
        r"the pattern 'blok_\*' matches no submodule of Elsewhere\. Name the blocks .* layers='block_\*'\. Cand",
    ),
    (["block_0", "blok_1"], r"'blok_1' names no submodule of Elsewhere\. Name the blocks"),
    (["block_0", "block_0.mlp"], r"'block_0\.mlp' is a part of 'block_0'"),
    (["block_0", "norm"], r"several classes \(Block, LayerNorm\)"),
    ([], r"expected a path, a pattern, or a list of these"),
    ("block_0,", r"expected a path, a pattern, or a list of these"),
    (3, r"expected a path, a pattern, or a list of these"),
    ([3], r"expected a path, a pattern, or a list of these"),
]


@pytest.mark.parametrize(("layers", "what"), ERRORS)
def test_what_names_no_blocks_has_one_message(layers: Any, what: str) -> None:
    net = Elsewhere("attributes")
    for find in (find_stack, find_stages):
        with pytest.raises(ValueError, match=what) as caught:
            find(net, layers, who="It")
        assert str(caught.value).startswith(f"It(layers={layers!r}): ")
        assert str(caught.value).endswith("Candidates: 'block_*' (4 x Block).")


def test_a_message_has_five_candidates_at_most() -> None:
    net = Holds(**{f"part{name}": Holds(**attributes("block_", repeat(3))) for name in "abcdefgh"})
    with pytest.raises(ValueError, match=r"Candidates: .*'parte.block_\*' \(3 x Residual\) and 3 more\."):
        find_stack(net, "nothing*", who="It")


def test_blocks_within_what_is_compiled_are_refused_by_every_name() -> None:
    body = Numbered(repeat(3))
    body.compile(backend="eager")
    net = Holds(body=body)
    for layers in (None, "body.layer*", ["body.layer1", "body.layer2"]):
        with pytest.raises(ValueError, match="are inside 'body', which is compiled"):
            refuse_compiled_around(net, find_stack(net, layers, who="It").path, who="It")


# -- what the module does with them


class By(Network):
    """Blocks as attributes, run by a function ``run(net, x)``."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], shown: bool = True, /, **blocks: nn.Module) -> None:
        super().__init__()
        self.run, self.shown = run, shown
        for name, block in blocks.items():
            setattr(self, name, block)

    def middle(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def forward(self, x: Tensor) -> Tensor:
        if not self.shown and not self.training:  # as in the passes that look at it before a fit
            raise RuntimeError("not now")
        return super().forward(x)


def heads(net: Any, x: Tensor) -> Tensor:
    return torch.stack([torch.tanh(getattr(net, f"head_{i}")(x)) for i in range(3)]).mean(0)


def through(*names: str) -> Callable[[Any, Tensor], Tensor]:
    def run(net: Any, x: Tensor) -> Tensor:
        for name in names:
            x = getattr(net, name)(x)
        return x

    return run


def outside(net: Any, x: Tensor) -> Tensor:
    """The residual branch is the module's own, and the blocks are only what is added."""
    for i in range(3):
        x = x + getattr(net, f"block_{i}")(x)
    return x


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.f(x))


def branches(start: str, length: int = 3, make: Callable[[], nn.Module] = Adds) -> dict[str, nn.Module]:
    return attributes(start, [make() for _ in range(length)])


def grown() -> ProgressiveStacking:
    return ProgressiveStacking(stages=[(0.0, 1), (0.5, 3)])


@pytest.mark.parametrize("technique", [StochasticDepth, lambda: LayerFreezing(start=0.1), grown])
@pytest.mark.parametrize("shown", [True, False])
def test_towers_side_by_side_are_not_taken_for_their_names(technique: Any, shown: bool) -> None:
    net = By(heads, shown, **branches("head_"))
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(
        ValueError, match=r"'head_\*' \(3 x Adds\) run side by side|of 'head_\*' .* is not fed by block 0"
    ):
        fit(net, technique())
    assert all(map(torch.equal, net.parameters(), before)), "refused before an update"
    assert side_by_side(net) == (frozenset({"head_*"}) if shown else frozenset())
    fit(By(heads, shown, **branches("head_")), Rematerialization(layers="head_*"))


@pytest.mark.parametrize("shown", [True, False])
def test_a_list_is_taken_before_more_towers(shown: bool, caplog: pytest.LogCaptureFixture) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = block(x)
        return heads(net, x)

    with caplog.at_level("INFO"):
        fit(By(run, shown, blocks=nn.ModuleList(Adds() for _ in range(2)), **branches("head_")), StochasticDepth())
    assert "blocks found at 'blocks' (2 x Adds)" in caplog.text


def test_a_longer_chain_of_attributes_is_taken_before_a_list(caplog: pytest.LogCaptureFixture) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        for block in net.stem:
            x = block(x)
        return through("block_0", "block_1", "block_2")(net, x)

    with caplog.at_level("INFO"):
        fit(By(run, stem=nn.ModuleList(Branch() for _ in range(2)), **branches("block_")), StochasticDepth())
    assert "blocks found at 'block_*' (3 x Adds)" in caplog.text


def test_blocks_that_run_in_another_order_than_their_numbers_are_to_be_named_in_it() -> None:
    run = through("up_2", "up_1", "up_0")
    net = By(run, **branches("up_"))
    with pytest.raises(ValueError, match=r"runs block 1 of 'up_\*' .* after block 2.*Give their paths in that order"):
        fit(net, LayerFreezing(start=0.1, end=0.5))
    technique = LayerFreezing(start=0.1, end=0.5, layers=["up_2", "up_1", "up_0"])
    net = By(run, **branches("up_"))
    before: Any = {name: p.clone() for name, p in net.named_parameters()}
    fit(net, technique, steps=8)
    moved = {name: float((p - before[name]).detach().abs().sum()) for name, p in net.named_parameters()}
    assert moved["up_2.f.weight"] < moved["up_1.f.weight"] < moved["up_0.f.weight"], (
        "the first that runs is frozen first"
    )


@pytest.mark.parametrize("technique", [StochasticDepth, grown])
def test_blocks_whose_residual_stream_is_the_modules_own_are_refused(technique: Any) -> None:
    net = By(outside, **branches("block_", make=Branch))
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=r"block 0 of 'block_\*' .* does not return its input plus something"):
        fit(net, technique())
    assert all(map(torch.equal, net.parameters(), before))


def test_parts_of_the_same_layers_do_not_grow_alone() -> None:
    run = through(*(f"{part}_{i}" for i in range(3) for part in ("mix", "ffn")))

    def net() -> By:
        return By(run, **branches("mix_"), **branches("ffn_", make=lambda: nn.Sequential(Adds(), Adds())))

    with pytest.raises(ValueError, match=r"equally long: 'mix_\*' \(3 x Adds\), 'ffn_\*' \(3 x Sequential\)"):
        fit(net(), grown())
    with pytest.raises(ValueError, match=r"each layer has a part in 'mix_\*' .* and another in 'ffn_\*'"):
        fit(net(), ProgressiveStacking(stages=[(0.0, 1), (0.5, 3)], layers="mix_*"))
    fit(net(), StochasticDepth(layers="mix_*"))


@pytest.mark.parametrize("layers", ["mix_*", "ffn_*"])
def test_stacks_that_run_in_turn_grow_alone_however_often_they_run(layers: str) -> None:
    run = through(*(f"{part}_{i}" for part in ("mix", "ffn") for i in range(3)))

    def twice(net: Any, x: Any) -> Any:
        return run(net, run(net, x))

    net = By(twice, **branches("mix_"), **branches("ffn_"))
    technique = ProgressiveStacking(stages=[(0.0, 1), (0.5, 3)], layers=layers)
    fit(net, technique)
    assert technique.report()["layers_active"] == 3


def test_one_part_of_a_stack_is_not_given_to_two_techniques() -> None:
    import lightning.pytorch as pl

    net = By(through("block_0", "block_1", "block_2"), **branches("block_"))
    data = torch.utils.data.TensorDataset(torch.randn(16, D), torch.randn(16, 1))
    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[StochasticDepth(), Rematerialization(layers=["block_0", "block_1"])],
    )
    with pytest.raises(
        ValueError, match=r"some blocks of 'block_0, block_1' .* are also in 'block_\*' .*layers='block_\*'"
    ):
        trainer.fit(net, torch.utils.data.DataLoader(data, 4))
