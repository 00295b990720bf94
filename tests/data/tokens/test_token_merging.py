"""TokenMerging: the matching by hand, duplicates that merge without a trace, sizes that add up, FLOPs that fall, refusals."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lightning_eff as eff
from examples.vit.module import EncoderBlock
from lightning_eff._core._tokens import merging
from lightning_eff._core._tokens.merging import Held
from lightning_eff._core.rng import keyed_generator
from lightning_eff.data.tokens.token_merging import TokenMerging, match, mergeable
from tests.cases import Case, classifier
from tests.data.tokens.images import B, D, MeanOfAll, Net, Registers, gradients, hugging_face
from tests.models import make_batch, module, trainer
from tests.runs import differences, final_state, fit

CASES = {
    "TokenMerging": Case(
        active=lambda: TokenMerging(r=2),
        neutral=lambda: TokenMerging(r=0),
        model="vit",
        refuses={
            "tiny_gpt": "block 0 of .* cannot merge tokens: its attention is causal",
            **dict.fromkeys(("gpt2", "llama"), "block 0 of .* cannot merge tokens: its arguments include .*position_"),
            "bert": "found no images in the batch",
        },
        lost=(classifier, "classifier", r"has the shape \(4, 8\); expected \(B, T, D\)"),
    )
}


class OwnProducts(nn.Module):
    """A block whose attention is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = EncoderBlock(D, 3, 0.0)

    def attend(self, x: Tensor) -> Tensor:
        inner = self.inner
        q, k, v = inner.attention.qkv(inner.norm1(x)).view(len(x), -1, 3, 3, D // 3).permute(2, 0, 3, 1, 4)
        weights = self.weights(q, k)
        return inner.attention.proj((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.inner.mlp(self.inner.norm2(x))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) * (D // 3) ** -0.5).softmax(dim=-1)


class Written(Net):
    """A net of such blocks."""

    block: Callable[[], nn.Module] = OwnProducts

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__(num_layers)
        self.blocks = nn.ModuleList(type(self).block() for _ in range(num_layers))


class Watched(TokenMerging):
    """Keeps what stood for what at each block of the latest step."""

    def attach(self, session: Any) -> None:
        super().attach(session)
        self.held: list[Held] = []
        plain = self._tokens._next

        def note(index: int, hidden: Tensor) -> Held:
            found = plain(index, hidden)
            self.held.append(found)
            return found

        self._tokens._next = note


class Once(Watched):
    """Merges in the first block alone."""

    def _merge(self, keys: Tensor) -> tuple[Tensor, int] | None:
        return super()._merge(keys) if keys.shape[1] == self._tokens.full else None


def close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=2e-6, msg=name)


# -- the rule


def by_hand(keys: Tensor, r: int, protected: list[int]) -> list[set[int]]:
    """The groups of one sample's tokens, in the order of the tokens that stay."""
    n = len(keys)
    pairs = []
    for a in range(0, n, 2):
        found = [(float(F.cosine_similarity(keys[a], keys[b], dim=0)), b) for b in range(1, n, 2) if b not in protected]
        if a not in protected:
            pairs.append((*max(found), a))
    groups = {i: {i} for i in range(n)}
    for _, b, a in sorted(pairs, reverse=True)[:r]:
        groups[b] |= groups.pop(a)
    return [groups[i] for i in sorted(groups)]


@pytest.mark.parametrize("n", [8, 9])
def test_the_matching_is_that_of_loops_over_pairs(n: int) -> None:
    keys = torch.randn(5, n, 4, generator=keyed_generator(1))
    special = [0, n - 1]
    protected = torch.zeros(n, dtype=torch.bool)
    protected[special] = True
    assert mergeable(protected) == 3 and mergeable(torch.tensor([False, True, False, True])) == 0
    for r in (1, 3):
        groups = match(keys, r, protected)
        for k, row in zip(keys, groups.tolist(), strict=True):
            got = [{i for i, g in enumerate(row) if g == group} for group in range(n - r)]
            assert got == by_hand(k, r, special)


# -- T: sizes add up; merged tokens count as many times as they stand for


def test_sizes_add_up_and_class_tokens_stay() -> None:
    technique = Watched(r=3)
    net = Registers()
    gradients(net, technique)
    assert net.lengths[-3:] == [19, 16, 22]  # after each block: those of a group are apart again after the last
    for held, tokens in zip(technique.held[-3:], (19, 16, 13), strict=True):
        sizes, places = held.after()
        assert sizes is not None and sizes.shape == (B, tokens) and (sizes.sum(dim=1) == 22).all()
        assert (sizes[:, [0, 1, 2, 3, -2, -1]] == 1).all()
        assert torch.equal(sizes, torch.stack([row.bincount(minlength=tokens) for row in places]).float())
    assert technique.report() == {"kept": 13, "share": 13 / 22}
    assert technique.summary() == "22 tokens per image merged to 13 in the last block of 'blocks' (3 x EncoderBlock)"


@pytest.mark.parametrize("cls", [Net, MeanOfAll, Written])
def test_gradients_are_those_of_all_tokens_with_groups_of_equal_ones(cls: type[Net]) -> None:
    """A merged token is as many equal ones: the plain blocks on all tokens, of which each group holds its mean."""
    technique = Watched(r=3)
    got = gradients(cls(), technique)
    places = [held.after()[1] for held in technique.held[-3:]]
    groups: list[Tensor] = []

    class AllTokens(cls):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
        def forward(self, images: Tensor) -> Tensor:
            x = self.embed(images)
            for block, place in zip(self.blocks, places, strict=True):
                groups.append(place)
                same = (place[:, :, None] == place[:, None, :]).float()
                inner = getattr(block, "inner", block)
                x = x + (block.attend(x) if isinstance(block, OwnProducts) else inner.attention(inner.norm1(x)))
                x = same @ x / same.sum(dim=-1, keepdim=True)
                x = x + inner.mlp(inner.norm2(x))
            return self.head(self.pool(x))

    close(got, gradients(AllTokens()))
    assert len(groups) == 3 and not torch.equal(groups[0], groups[2])


def doubled(net: pl.LightningModule, position: Tensor, special: int) -> dict[str, Tensor]:
    """Images and positions of which each two neighbouring patches are alike: the net is changed, the batch returned."""
    patches = position[:, special:]
    patches.data.copy_(patches[:, ::2].repeat_interleave(2, dim=1))
    batch = make_batch("vit", B)
    halves = batch["pixel_values"].unflatten(-1, (2, 4))[..., :2]  # (B, 1, 8, 2, 2): a patch of each two
    return {**batch, "pixel_values": torch.cat([halves, halves], dim=-1).flatten(-2)}


@pytest.mark.parametrize("name", ["net", "written", "vit", "eager", "dinov2_with_registers"])
def test_merging_duplicates_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks, of which the second runs on one of each two that are alike, and counts it twice."""

    def run(*techniques: pl.Callback) -> dict[str, Tensor]:
        if name in ("net", "written"):
            net: Any = (Net if name == "net" else Written)(2)
            position, special = net.position, 0
        else:
            how = {"attn_implementation": "eager"} if name == "eager" else {}
            net = hugging_face("vit" if name == "eager" else name, num_hidden_layers=2, **how)
            position = next(p for key, p in net.named_parameters() if key.endswith("position_embeddings"))
            position.data.normal_(generator=keyed_generator(2))
            special = 1
        return gradients(net, *techniques, batch=doubled(net, position, special))

    technique = Once(r=8)
    got = run(technique)
    held = technique.held[-1]
    assert held.sizes is not None and held.sizes.max() == 2 and int((held.sizes == 2).sum()) == 8 * B
    plain = run()
    close(got, plain)
    # and it is the sizes that make it so
    monkeypatch.setattr(merging, "Proportional", lambda *args: ONES(*args[:2], None))
    other = run(Once(r=8))
    assert any(not torch.allclose(other[key], plain[key], rtol=1e-3, atol=1e-5) for key in plain)


ONES = merging.Proportional


def test_merging_none_is_the_plain_module_bit_for_bit() -> None:
    plain = final_state(*fit("vit", list, max_steps=2))
    assert differences(final_state(*fit("vit", lambda: [TokenMerging(r=0)], max_steps=2)), plain) == []
    assert differences(final_state(*fit("vit", lambda: [TokenMerging(r=2)], max_steps=2)), plain) != []


def test_evaluation_sees_all_tokens() -> None:
    net = Net()
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)  # type: ignore[method-assign]
    data = DataLoader([make_batch("vit", B)], batch_size=None)
    t = trainer(TokenMerging(r=4), max_steps=1, limit_val_batches=1, val_check_interval=1, num_sanity_val_steps=0)
    t.fit(net, data, DataLoader([make_batch("vit", B)], batch_size=None))
    assert net.lengths[-6:] == [13, 9, 17, 17, 17, 17]
    plain = F.cross_entropy(net(make_batch("vit", B)["pixel_values"]), make_batch("vit", B)["labels"])
    assert t.callback_metrics["val_loss"].item() == plain.item()


def from_the_paper(net: Any, images: Tensor, r: int, special: int) -> Tensor:
    """Logits of a transformer that merges by loops over samples, pairs and groups, as the paper says."""
    found = []
    for image in images:
        x = net.embed(image[None])[0]
        sizes = torch.ones(len(x))
        for block in net.blocks:
            n = len(x)
            q, k, v = block.attention.qkv(block.norm1(x)).view(n, 3, 3, D // 3).permute(1, 2, 0, 3)
            weights = (q @ k.transpose(1, 2) / (D // 3) ** 0.5 + sizes.log()).softmax(-1)
            x = x + block.attention.proj((weights @ v).transpose(0, 1).flatten(1))
            merging = min(r, len([i for i in range(0, n, 2) if i >= special]))
            groups = by_hand(k.mean(0).detach(), merging, [*range(special)])
            x = torch.stack([(sizes[[*g], None] * x[[*g]]).sum(0) / sizes[[*g]].sum() for g in groups])
            sizes = torch.stack([sizes[[*g]].sum() for g in groups])
            x = x + block.mlp(block.norm2(x))
        found.append(x[0])
    return net.head(torch.stack(found))


@pytest.mark.parametrize("r", [2, 3, 8])
def test_it_is_the_paper_s_network_in_training_and_evaluation(r: int) -> None:
    """The class token goes to the head, which sees none of the others."""
    net, batch = Net(), make_batch("vit", B)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)  # type: ignore[method-assign]
    wanted = F.cross_entropy(from_the_paper(net, batch["pixel_values"], r, 1), batch["labels"])
    wanted.backward()
    expected = {name: cast(Tensor, p.grad).clone() for name, p in net.named_parameters()}
    wanted, plain = wanted.detach(), F.cross_entropy(net(batch["pixel_values"]), batch["labels"]).detach()
    net.zero_grad()
    close(gradients(net, TokenMerging(r=r)), expected)
    data = [DataLoader([batch], batch_size=None) for _ in range(2)]
    for evaluate, loss in ((True, wanted), (False, plain)):
        t = trainer(TokenMerging(r=r, evaluate=evaluate), max_steps=1, limit_val_batches=1, num_sanity_val_steps=0)
        t.fit(net, *data)
        torch.testing.assert_close(t.callback_metrics["val_loss"], loss, rtol=1e-5, atol=1e-6)
    assert abs(float(wanted - plain)) > 1e-3


def test_evaluation_alone_merges_by_what_a_checkpoint_holds(tmp_path: Path, caplog: Any) -> None:
    net, data = Net(), DataLoader([make_batch("vit", B)], batch_size=None)
    t = trainer(TokenMerging(r=4, evaluate=True), max_steps=1, limit_val_batches=1, num_sanity_val_steps=1)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        t.fit(net, data, DataLoader([make_batch("vit", B)], batch_size=None))
    assert caplog.text.count("evaluation sees all tokens until a training step has found those of an image") == 1
    assert net.lengths[:3] == [17, 17, 17] and net.lengths[-3:] == [13, 9, 17]
    t.save_checkpoint(tmp_path / "a.ckpt")
    fresh = Net()
    found = trainer(TokenMerging(r=4, evaluate=True), limit_val_batches=1).validate(
        fresh, data, ckpt_path=tmp_path / "a.ckpt", verbose=False
    )
    assert fresh.lengths == [13, 9, 17]
    assert found[0]["val_loss"] == pytest.approx(float(t.callback_metrics["val_loss"]), rel=1e-6)


# -- T: FLOPs fall as predicted


def test_flops_fall_by_those_of_the_blocks_on_fewer_tokens() -> None:
    def flops(part: Callable[[nn.Module], nn.Module], tokens: int) -> int:
        with FlopCounterMode(display=False) as counter:
            part(EncoderBlock(D, 3, 0.0))(torch.randn(B, tokens, D, requires_grad=True)).sum().backward()
        return counter.get_total_flops()

    class Counts(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            self.counter = FlopCounterMode(display=False)
            self.counter.__enter__()

        def on_train_batch_end(self, *args: Any) -> None:
            self.counter.__exit__(None, None, None)
            self.last = self.counter.get_total_flops()

    def step(*techniques: pl.Callback) -> int:
        count = Counts()
        data = DataLoader([make_batch("vit", B)] * 2, batch_size=None)
        trainer(*techniques, count, max_steps=2).fit(Net(), data)
        return count.last

    attention = [flops(lambda block: cast(Any, block).attention, n) for n in (17, 13, 9)]
    mlp = [flops(lambda block: cast(Any, block).mlp, n) for n in (17, 13, 9, 5)]
    less = sum(attention[0] - n for n in attention) + sum(mlp[0] - n for n in mlp[1:])
    cosines = sum(2 * B * (n // 2 + 1) * (n // 2) * D // 3 for n in (17, 13, 9))
    assert step(TokenMerging(r=4)) == step() - less + cosines


# -- beside others


class TwoViews(Net):
    """Two passes over the blocks before one backward pass, each block run again in it."""

    how: bool | None = None  # use_reentrant; None runs none again

    def forward(self, images: Tensor) -> Tensor:
        found = []
        for view in (images, images.flip(-1)):
            x = self.embed(view)
            for block in self.blocks:
                x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how)
            found.append(x[:, 0])
        return self.head(found[0] * found[1])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the pass that looks
def test_blocks_that_run_again_do_so_on_the_tokens_that_they_had() -> None:
    expected = gradients(TwoViews(), TokenMerging(r=3))
    for how in (False, True):
        net = TwoViews()
        net.how = how
        close(gradients(net, TokenMerging(r=3)), expected)
    plain = gradients(hugging_face(), TokenMerging(r=3))
    for policy in ("full", "sqrt"):
        close(gradients(hugging_face(), TokenMerging(r=3), eff.Rematerialization(policy=policy)), plain)


def test_with_techniques_that_change_which_blocks_run() -> None:
    for other in (
        eff.ProgressiveLayerDropping(theta_min=0.3, gamma=20.0),
        eff.SharpnessAwareMinimization(rho=0.05),
    ):
        technique = TokenMerging(r=2)
        net, t = fit("vit", lambda technique=technique, other=other: [technique, other], max_steps=4)
        assert t.global_step == 4 and all(p.isfinite().all() for p in net.parameters())
        assert 9 <= technique.report()["kept"] < 17


def test_smaller_images_later() -> None:
    class AnySize(Net):
        def embed(self, images: Tensor) -> Tensor:
            x = self.patches(images).flatten(2).transpose(1, 2)
            return torch.cat([self.special.expand(len(x), -1, -1), x + self.position[:, : x.shape[1]]], dim=1)

    net, batch, technique = AnySize(4), make_batch("vit", B), TokenMerging(r=6)
    small = {**batch, "pixel_values": batch["pixel_values"][..., :4]}
    least = {"pixel_values": batch["pixel_values"][:2, :, :4, :4], "labels": batch["labels"][:2]}
    trainer(technique, max_steps=3).fit(net, DataLoader([batch, small, least], batch_size=None))
    # of five tokens no more than two are at even places, and of three one; then there are as many tokens as samples
    assert net.lengths[-12:] == [11, 6, 4, 17, 5, 3, 2, 9, 3, 2, 2, 5]
    assert technique.report() == {"kept": 2, "share": 2 / 5}


# -- what is refused


class ByExponentials(OwnProducts):
    """Attention without a softmax that can be seen."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)).exp()
        return scores / scores.sum(dim=-1, keepdim=True)


class OwnMask(OwnProducts):
    """Causal by a mask of its own."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.transpose(-2, -1)).masked_fill(hidden, -torch.inf).softmax(dim=-1)


class TwoHalves(OwnProducts):
    """Some heads by a softmax of a product, others by exponentials."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        other = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
        return (scores.softmax(dim=-1) + other) / 2


class Checkpoints(OwnProducts):
    """Its attention runs again by itself."""

    how = False  # use_reentrant

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return checkpoint(super().weights, q, k, use_reentrant=self.how)  # pyright: ignore[reportReturnType]


class ChecksReentrantly(Checkpoints):
    how = True


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


def of(block: Callable[[], nn.Module]) -> pl.LightningModule:
    return type("Other", (Written,), {"block": staticmethod(block)})()


class Parallel(OwnProducts):
    """Attention and MLP of the same tokens."""

    def forward(self, x: Tensor) -> Tensor:
        mlp = self.inner.mlp(self.inner.norm2(x))
        return x + self.attend(x) + mlp


class Subtracts(OwnProducts):
    def forward(self, x: Tensor) -> Tensor:
        x = x - self.attend(x)
        return x + self.inner.mlp(self.inner.norm2(x))


class Coarse(Net):
    """One patch, at an odd place."""

    before = 3

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, D, 8, 8)
        self.position = nn.Parameter(torch.randn(1, 1, D))


def shared() -> pl.LightningModule:
    net = Net()
    net.blocks[2] = net.blocks[1]
    return net


def compiled() -> pl.LightningModule:
    net = Net()
    for block in net.blocks:
        block.compile(backend="eager")
    return net


class Backwards(Net):
    """From the last block to the first."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in [*self.blocks][::-1]:
            x = block(x)
        return self.head(x[:, 0])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: of(ByExponentials), "block 0 .* cannot merge tokens: its attention is neither .*attn_implementation"),
        (lambda: of(OwnMask), "block 0 .* cannot merge tokens: with sizes it computes something else"),
        (lambda: of(TwoHalves), "block 0 .* cannot merge tokens: with sizes it computes something else"),
        (
            lambda: of(Convolution),
            "block 0 .* cannot be given fewer of its tokens: its output depends on token positions",
        ),
        (lambda: of(Checkpoints), "block 0 .* cannot merge tokens: its own code checkpoints its attention"),
        (lambda: of(ChecksReentrantly), "block 0 .* cannot merge tokens: its own code checkpoints its attention"),
        (shared, "holds the same block several times"),
        (compiled, "block 0 .* cannot merge tokens: it is compiled"),
        (Backwards, r"calls the blocks \[2, 1, 0\] of .* in this order; expected each of \[0, 1, 2\] once per pass"),
        (Coarse, "gets 4 tokens per image, 3 of them not patches, but merging needs four or more patches"),
        (lambda: of(Parallel), "block 0 .* cannot merge tokens: behind its attention it"),
        (lambda: of(Subtracts), "block 0 .* cannot merge tokens: it nowhere adds the result of its attention"),
    ],
)
def test_what_is_refused(build: Callable[[], pl.LightningModule], message: str) -> None:
    net = build()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=f"TokenMerging.*{message}"):
        gradients(net, TokenMerging(r=2, layers="blocks"))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("r", [-1, 1.5, True])
def test_arguments_out_of_their_range(r: Any) -> None:
    with pytest.raises(ValueError, match=rf"TokenMerging\(r={r}\): expected an integer >= 0"):
        TokenMerging(r=r)


def test_tables_and_checkpoints_of_transformers_are_refused_and_compiled_blocks_conflict() -> None:
    with pytest.raises(ValueError, match=r"cannot merge tokens: its arguments include .*position_embeddings\.0"):
        gradients(module("llama"), TokenMerging(), batch=make_batch("llama"))
    net = hugging_face()
    for m in net.modules():
        if hasattr(m, "gradient_checkpointing"):
            m.gradient_checkpointing = True
            m._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    with pytest.raises(ValueError, match=r"its own code checkpoints its attention \(transformers"):
        gradients(net, TokenMerging(r=3))
    with pytest.raises(ValueError, match="compiled code hides the blocks' attention"):
        gradients(Net(), TokenMerging(), eff.RegionalCompilation())
