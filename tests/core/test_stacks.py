"""What a stack of blocks is: each block feeds the next one, and may be skipped only if it adds to what it is given."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_eff import (
    AutoProg,
    DropIn,
    HoulsbyAdapters,
    LayerFreezing,
    LayerScale,
    Muon,
    ProgressiveLayerDropping,
    ProgressiveStacking,
    Rematerialization,
    ReplaceOptimizer,
    StochasticDepth,
    TFixup,
    ZerO,
    apply,
)
from lightning_eff._core._branches.side_by_side import side_by_side, verdicts
from lightning_eff._core._stack.residual import adds_to, is_subtracted
from lightning_eff._core.blocks import stacks

D = 8


class Network(pl.LightningModule):
    """Features (B, 8) to one number; what stands in the middle is a subclass's."""

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(self.inp(x)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(D, D), nn.Linear(D, 1)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.f(x))


class Heads(Network):
    """Four heads side by side, and maybe a shorter list of blocks that follow one another."""

    def __init__(self, chain: int = 0, head: Callable[[], nn.Module] = lambda: nn.Linear(D, D)) -> None:
        super().__init__()
        self.heads = nn.ModuleList(head() for _ in range(4))
        self.chain = nn.ModuleList(Adds() for _ in range(chain))
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, D)

    def middle(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        x = torch.stack([head(x) for head in self.heads]).mean(0)
        for block in self.chain:
            x = block(nn.functional.layer_norm(x, (D,)))
        return torch.tanh(self.after(x))


class Stack(Network):
    """Blocks of some class, run by a function ``run(blocks, x)``."""

    def __init__(self, block: Callable[[], nn.Module], run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(block() for _ in range(3)), run

    def middle(self, x: Tensor) -> Tensor:
        return self.run(self.blocks, x)


def fit(module: pl.LightningModule, technique: Any, *, steps: int = 4) -> pl.Trainer:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(16, D), torch.randn(16, 1))
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[technique],
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, 4))
    return trainer


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))


USERS = [
    StochasticDepth,
    ProgressiveLayerDropping,
    LayerFreezing,
    functools.partial(ProgressiveStacking, stages=[(0.0, 1), (0.5, 2)]),
]


@pytest.mark.parametrize("technique", USERS)
@pytest.mark.parametrize("head", [lambda: nn.Linear(D, D), two_layers])
def test_heads_side_by_side_are_no_stack(technique: Any, head: Any) -> None:
    module = Heads(head=head)
    before = {name: p.clone() for name, p in module.named_parameters()}
    with pytest.raises(ValueError, match=r"side by side|is not fed by") as caught:
        fit(module, technique())
    assert "layers='heads'" not in str(caught.value)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters()), "refused before an update"


def test_a_shorter_chain_is_taken_before_longer_heads() -> None:
    module = Heads(chain=2)
    assert side_by_side(module) == {"heads"}
    assert verdicts(module, stacks(module)) == {"heads": False, "chain": True}
    technique = LayerFreezing(start=0.2)
    fit(module, technique)
    assert technique._where == "2 blocks of 'chain'"


def test_of_equally_long_lists_the_chain_is_taken_also_by_what_takes_any_list(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        fit(Heads(chain=4, head=lambda: nn.Sequential(nn.Linear(D, D))), Rematerialization(policy="full"))
    assert "blocks found at 'chain'" in caplog.text


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Conv1d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x.unsqueeze(-1)).squeeze(-1)  # a view
        y += x
        return y


def test_a_sum_in_place_of_a_view_is_named() -> None:
    with pytest.raises(ValueError, match=r"changes a view in place, .* \(write y = y \+ x instead of y \+= x\)"):
        apply(Stack(AddsInPlace, lambda blocks, x: blocks[2](blocks[1](blocks[0](x)))), LayerScale())


class Split(Network):
    """Each layer's two parts stand in two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList(two_layers() for _ in range(3)) for _ in range(2))

    def middle(self, x: Tensor) -> Tensor:
        for i in range(len(self.first)):
            x = x + self.first[i](x)
            x = x + self.second[i](x)
        return x


def test_lists_that_hold_parts_of_the_same_layers_do_not_grow_alone() -> None:
    with pytest.raises(ValueError, match=r"each layer has a part in 'first' .* and another in 'second' .*would grow"):
        fit(Split(), ProgressiveStacking(stages=[(0.0, 1), (0.5, 2)], layers="first"))
    fit(Split(), LayerFreezing(layers="first"))


class Singles(Network):
    """Lists of single layers that run side by side, in a part that made-up inputs do not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.ModuleList(nn.Linear(D, D) for _ in range(2)) for _ in range(2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        heads = [torch.tanh(q(batch[0])) * k(batch[0]) for q, k in zip(self.q, self.k, strict=True)]
        return torch.stack(heads).square().mean()


@pytest.mark.parametrize("technique", USERS[:2])
def test_lists_of_single_layers_are_not_called_stacks(technique: Any) -> None:
    with pytest.raises(ValueError, match=r"found no stacks? of .*blocks|side by side") as caught:
        fit(Singles(), technique())
    assert "Choose one" not in str(caught.value)


def test_a_named_list_of_heads_is_refused_in_the_first_step_and_the_chain_is_named() -> None:
    module = Heads(chain=2)
    before = {name: p.clone() for name, p in module.named_parameters()}
    with pytest.raises(ValueError, match=r"block 1 of 'heads' .* is not fed by block 0.*layers='chain'"):
        fit(module, StochasticDepth(layers="heads"))
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


def test_muon_takes_the_same_matrices_whether_heads_stand_in_a_list() -> None:
    module = Heads()
    module.out = module._modules.pop("out")  # the last layer is registered last
    trainer = fit(module, ReplaceOptimizer(functools.partial(Muon, lr=0.02)), steps=1)
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [g for g in trainer.optimizers[0].param_groups if "orthogonalization" in g]
    taken = {names[id(p)] for g in groups for p in g["params"]}
    assert taken == {"before.weight", "after.weight", *(f"heads.{i}.weight" for i in range(4))}


# -- blocks that may be skipped


class Gives(nn.Module):
    """A block of N-BEATS: what it explains of its input, and of the output."""

    def __init__(self, residual: bool = False) -> None:
        super().__init__()
        self.f, self.g, self.residual = nn.Linear(D, D), nn.Linear(D, D), residual

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        back = torch.tanh(self.f(x))
        return (x + back if self.residual else back), self.g(x)


def subtracted(blocks: Any, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for block in blocks:
        back, fore = block(x)
        x, total = x - back, total + fore
    return total


def summed(blocks: Any, x: Tensor) -> Tensor:
    """The skip connections of WaveNet: the loss is taken of their sum."""
    total = torch.zeros_like(x)
    for block in blocks:
        x, skip = block(x)
        total = total + skip
    return total


class Remembers(Adds):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.tanh(self.f(x))
        return x + self.seen


def read_after(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    blocks[0].importance = float(sum(block.seen.detach().mean() for block in blocks))
    return x


def one_by_one(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


class InDict(Adds):
    """A block of SqueezeBERT: its hidden state is in a dict."""

    def forward(self, x: Tensor) -> Any:
        return {"feature_map": super().forward(x)}


def keyed(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)["feature_map"]
    return x


def keyed_by_forward(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block.forward(x)["feature_map"]
    return x


def by_forward(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block.forward(x)
    return x


def by_parts(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = x + torch.tanh(block.f(x))
    return x


UNCALLED = [(InDict, keyed_by_forward), (Adds, by_forward), (Adds, by_parts)]
REFUSED = [
    (Gives, subtracted, "does not return its input plus something"),
    (functools.partial(Gives, residual=True), subtracted, "subtracts what a block"),
    (functools.partial(Gives, residual=True), summed, "the loss uses more outputs of block 0"),
    (Remembers, read_after, r"reads blocks\.0\.seen"),
    (InDict, keyed, "block 0 of 'blocks' .* returns dict, so .*; expected a tensor, or a tuple"),
    *((block, run, "runs 'blocks' .* without calling its blocks") for block, run in UNCALLED),
]
SKIPPING = [*USERS[:2], functools.partial(AutoProg, resolution=1.0)]


@pytest.mark.parametrize(("block", "run", "why"), REFUSED)
@pytest.mark.parametrize("technique", SKIPPING)
def test_blocks_that_cannot_be_skipped_are_refused_before_an_update(
    block: Any, run: Any, why: str, technique: Any
) -> None:
    module = Stack(block, run)
    before = {name: p.clone() for name, p in module.named_parameters()}
    with pytest.raises(ValueError, match=why):
        fit(module, technique())
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(type(m).__module__ == __name__ for m in module.blocks), "no trace"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


@pytest.mark.parametrize(("block", "run"), UNCALLED)
def test_outputs_of_blocks_that_run_without_a_call_cannot_be_mixed(block: Any, run: Any) -> None:
    with pytest.raises(ValueError, match=r"DropIn: the module runs 'blocks' .* without calling its blocks"):
        fit(Stack(block, run), DropIn(first=1))


@pytest.mark.parametrize(("block", "run"), UNCALLED)
def test_blocks_that_run_without_a_call_can_be_hidden_from_the_module(block: Any, run: Any) -> None:
    """What a block returns matters only to techniques that skip it, so growth behind the last block works."""
    module = Stack(block, run)
    for technique in (ProgressiveStacking(stages=[(0.0, 1), (0.5, 2)]), LayerFreezing()):
        assert fit(module, technique).global_step == 4


class Manual(Heads):
    """It steps by itself, so what is wrong must be told within the step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_under_manual_optimization_heads_are_refused_before_an_update() -> None:
    module = Manual(chain=2)
    before = {name: p.clone() for name, p in module.named_parameters()}
    with pytest.raises(ValueError, match=r"block 1 of 'heads' .* is not fed by block 0.*layers='chain'"):
        fit(module, StochasticDepth(layers="heads"))
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    fit(module, StochasticDepth(layers="chain"))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: Heads(head=two_layers), "is not fed by block 0"),
        (lambda: Stack(Gives, subtracted), "does not return its input plus something"),
        (lambda: Stack(functools.partial(Gives, residual=True), subtracted), "subtracts what a block"),
        (lambda: Stack(Adds, one_by_one), None),
    ],
)
def test_compiled_blocks_are_looked_at_outside_of_what_is_compiled(module: Any, why: str | None) -> None:
    module, graphs = module(), list[str]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    blocks = list(module.heads if isinstance(module, Heads) else module.blocks)
    for block in blocks:
        block.compile(backend=backend)
    calls = [block._compiled_call_impl for block in blocks]
    technique = StochasticDepth(layers="heads" if isinstance(module, Heads) else "blocks")
    if why is None:
        fit(module, technique)
        assert len(graphs) <= 2  # as many as without a look: no hook is compiled
    else:
        with pytest.raises(ValueError, match=why):
            fit(module, technique)
    assert [block._compiled_call_impl for block in blocks] == calls


@pytest.mark.parametrize(("block", "run"), [(Adds, one_by_one), (Remembers, one_by_one)])
def test_residual_blocks_train(block: Any, run: Any) -> None:
    module = Stack(block, run)
    fit(module, StochasticDepth(drop=0.5))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_growth_of_blocks_that_are_only_shown_in_part_needs_no_residual_stream(tmp_path: Path) -> None:
    module, technique = Stack(Gives, subtracted), ProgressiveStacking(stages=[(0.0, 2), (0.5, 3)])
    fit(module, technique)
    assert technique.report()["layers_active"] == 3


def test_sums_are_read_off_the_graph() -> None:
    f, x = nn.Linear(D, D), nn.Linear(D, D)(torch.randn(2, D))
    for y in (x + f(x), torch.relu(x + f(x)), nn.LayerNorm(D)(x + f(x)), x - f(x), torch.stack([x, f(x)]).sum(0)):
        assert adds_to(x, y) is True
    for y in (f(x), torch.relu(f(x)), f(x) - x, x * torch.sigmoid(f(x))):
        assert adds_to(x, y) is False
    assert adds_to(x, y.detach()) is None
    y = x + f(x)
    assert is_subtracted(x - y, y) and not is_subtracted(nn.LayerNorm(D)(y), y) and not is_subtracted(x + y, y)


# -- residual branches


class Scores(nn.Module):
    """Attention whose scores are added to those of the block before, as in RealFormer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        scores = scores if before is None else scores + before
        return x + self.o(torch.softmax(scores, -1) @ self.v(x)), scores


class RealFormer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(D, D), nn.ModuleList(Scores() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, scores = self.embed(x), None
        for block in self.blocks:
            x, scores = block(x, scores)
        return x


def test_attention_scores_are_no_residual_branch() -> None:
    module = RealFormer()
    apply(module, LayerScale())
    scaled = {name.rpartition(".")[0] for name, _ in module.named_parameters() if "branch_scale" in name}
    assert scaled == {f"blocks.{i}.o" for i in range(3)}


class Sometimes(nn.Module):
    """A block that adds to its input only if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.whole = nn.Linear(D, D), nn.Linear(D, D), True

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(torch.tanh(x))
        return x + self.b(torch.tanh(x)) if self.whole else torch.tanh(self.b(x))


def test_equal_blocks_with_unequal_branches_are_an_error_with_the_list() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Sequential(*(Sometimes() for _ in range(3))))
    apply(module, LayerScale())
    module = nn.Sequential(nn.Linear(D, D), nn.Sequential(*(Sometimes() for _ in range(3))))
    module[1][2].whole = False
    with pytest.raises(ValueError, match=r"unequal residual branches.*these in: 1\.2 \(a\.weight\)"):
        apply(module, LayerScale())


def test_a_block_that_takes_the_batch_itself_has_the_branches_of_the_others() -> None:
    """Its input takes no gradient, so autograd's graph shows what it adds to it only if the pass gives it one."""
    module = nn.ModuleDict({"blocks": nn.Sequential(*(Sometimes() for _ in range(3)))})
    module.forward = lambda x: module["blocks"](x)
    apply(module, LayerScale(), batch=(torch.randn(4, D),))
    scaled = {name.rpartition(".")[0] for name, _ in module.named_parameters() if "branch_scale" in name}
    assert scaled == {f"blocks.{i}.{name}" for i in range(3) for name in "ab"}


class Attends(Sometimes):
    """The same, behind attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return super().forward(x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)))


@pytest.mark.parametrize(
    ("technique", "argument"),
    [(functools.partial(HoulsbyAdapters, 2), "names"), (ZerO, "branches"), (TFixup, "branches")],
)
def test_unequal_branches_are_an_error_wherever_the_ends_of_branches_are_looked_for(
    technique: Any, argument: str
) -> None:
    def through(blocks: Any, x: Tensor) -> Tensor:
        return one_by_one(blocks, x.unsqueeze(1).expand(-1, 3, -1)).mean(1)

    fit(Stack(Attends, through), technique())
    module = Stack(Attends, through)
    last: Any = module.blocks[2]
    last.whole = False
    with pytest.raises(ValueError, match=rf"unequal residual branches.*these in: blocks\.2 \(.*{argument}=\["):
        fit(module, technique())


def test_a_module_that_needs_every_block_is_told_of_those_that_do_not_run() -> None:
    """As FT-Transformer's feature importance, which has a place for the attention of each block."""

    def kept(blocks: Any, x: Tensor) -> Tensor:
        places: list[Any] = [None] * 3
        for i, block in enumerate(blocks):
            x = block(x)
            places[i] = x
        return x + sum(place.mean() for place in places)

    net = Stack(Adds, kept)
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=r"ProgressiveStacking: 2 of the 3 blocks.*raised AttributeError.*every block"):
        fit(net, ProgressiveStacking(stages=[(0.0, 2), (0.5, 3)]))
    assert all(map(torch.equal, net.parameters(), before))


def test_an_error_that_all_blocks_raise_stays_its_own() -> None:
    def fails(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        raise LookupError("planted")

    with pytest.raises(LookupError, match="planted"):
        fit(Stack(Adds, fails), ProgressiveStacking(stages=[(0.0, 2), (0.5, 3)]))
