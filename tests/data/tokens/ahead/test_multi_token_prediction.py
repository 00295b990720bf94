"""MultiTokenPrediction against losses that are written by hand; which tokens count, what is exported, what is refused."""

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff import FusedLinearCrossEntropy, MultiTokenPrediction
from lightning_eff.data.tokens.ahead.multi_token_prediction import targets_ahead, weight_at
from tests.cases import Case, classifier
from tests.data.tokens import heads
from tests.models import LENGTH, VOCAB, TinyGPT, loader, make_batch, module, trainer

CASES = {
    "MultiTokenPrediction": Case(
        active=lambda: MultiTokenPrediction(),
        neutral=lambda: MultiTokenPrediction([]),
        architecture=True,
        refuses={
            "classifier": "are no tokens",
            "vit": "are no tokens",
            "bert": "hidden states that depend on later tokens",
            "convolved": "hidden states that depend on later tokens",
        },
        lost=(classifier, "classifier", "found no output layer"),
    )
}
IGNORED = -100


def stopped(*callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    return trainer(*callbacks, **{"max_steps": 3, "precision": "64-true", **kwargs})


def batches(name: str, ignored: bool) -> DataLoader[Any]:
    found = [make_batch(name, 3, 12, seed) for seed in range(3)]
    for batch in found if ignored else ():
        batch["labels"][0, 5] = batch["labels"][1, 8:] = IGNORED
    return DataLoader(found, batch_size=None)  # pyright: ignore[reportArgumentType]


def by_hand(
    h: Tensor, head: nn.Module, labels: Tensor, transforms: list[Tensor | None], weights: list[float]
) -> Tensor:
    """The sum of weighted losses; ``labels`` (B, T) are of the next token of each position."""
    losses = [F.cross_entropy(head(h).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)]
    for k, (w, m) in enumerate(zip(weights, transforms, strict=True), 2):
        total, count = torch.zeros((), dtype=h.dtype), 0
        for b in range(len(labels)):
            for t in range(labels.shape[1] - k + 1):
                if bool((labels[b, t : t + k] != IGNORED).all()):
                    z = h[b, t] if m is None else h[b, t] + F.silu(m @ h[b, t])
                    total, count = total - head(z).log_softmax(-1)[labels[b, t + k - 1]], count + 1
        losses.append(w * total / count)
    return torch.stack(losses).sum()


class ByHand(TinyGPT):
    """It writes the loss of further tokens itself."""

    def __init__(self, weights: list[float], own: bool) -> None:
        super().__init__(2, dropout=0.0)
        self.weights, self.own = weights, own
        self.transforms = nn.ParameterList([nn.Parameter(torch.zeros(16, 16)) for _ in weights if own])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        kept: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
        self(batch["input_ids"])
        handle.remove()
        transforms: list[Tensor | None] = [*self.transforms] if self.own else [None] * len(self.weights)
        return by_hand(kept[0], self.head, batch["labels"], transforms, self.weights)


def with_capped_head(net: TinyGPT) -> TinyGPT:
    """The network with a head that has a forward of its own around that of ``nn.Linear``."""
    capped = heads.Capped(net.head.in_features, net.head.out_features, bias=net.head.bias is not None)
    capped.load_state_dict(net.head.state_dict())
    net.head = capped
    return net


@pytest.mark.parametrize(
    ("own", "ignored", "capped"),
    [(True, False, False), (True, True, False), (False, False, False), (False, True, False), (True, True, True)],
)
def test_training_equals_losses_by_hand(own: bool, ignored: bool, capped: bool) -> None:
    torch.manual_seed(0)
    reference = ByHand([0.5, 0.25], own)
    ours = TinyGPT(2, dropout=0.0)
    if capped:
        with_capped_head(reference), with_capped_head(ours)
    ours.load_state_dict({k: v for k, v in reference.state_dict().items() if "transforms" not in k})
    stopped().fit(reference, batches("tiny_gpt", ignored))
    technique = MultiTokenPrediction((0.5, 0.25), heads="own" if own else "shared")
    stopped(technique).fit(ours, batches("tiny_gpt", ignored))
    found, expected = dict(ours.named_parameters()), dict(reference.named_parameters())
    assert len(found) == len(expected)
    for name, p in expected.items():
        mine = found[name if "transforms" not in name else f"head.ahead_{int(name[-1]) + 2}"]
        assert p.dtype == torch.float64
        torch.testing.assert_close(mine, p, rtol=1e-10, atol=1e-10, msg=name)


class Shifting(TinyGPT):
    """It shifts labels itself, and begins texts with one that does not count."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("name", ["by hand", "gpt2", "llama"])
def test_labels_that_the_module_shifts_itself_give_the_same_loss(name: str) -> None:
    hugging = name != "by hand"  # whose losses are of float32
    torch.manual_seed(0)
    plain: Any = module(name, num_layers=2) if hugging else Shifting(2, dropout=0.0).double()
    batch = make_batch("gpt2", 3, 12)
    batch["labels"][0, :4] = batch["labels"][2, 9] = IGNORED
    seen, once = Losses(), DataLoader([batch], batch_size=None)  # pyright: ignore[reportArgumentType]
    precision: Any = "32-true" if hugging else "64-true"
    stopped(MultiTokenPrediction((0.5, 0.25)), seen, max_steps=1, precision=precision).fit(copy.deepcopy(plain), once)
    kept: list[Tensor] = []
    head = plain.model.lm_head if hugging else plain.head
    head.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    (plain.model if hugging else plain)(batch["input_ids"])
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    expected = by_hand(kept[0], head, labels, [None, None], [0.5, 0.25])
    torch.testing.assert_close(seen.losses[0], expected, rtol=1e-6 if hugging else 1e-10, atol=0)


class Losses(pl.Callback):
    """The training loss of each batch."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].detach())


class Slicing(TinyGPT):
    """It takes inputs and targets from one tensor (B, T + 1), as many training scripts do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def test_inputs_and_targets_may_be_parts_of_one_tensor() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (3, 13))
    plain = TinyGPT(2, dropout=0.0)
    sliced = Slicing(2, dropout=0.0)
    sliced.load_state_dict(plain.state_dict())
    given: Any = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    for net, batch in ((plain, given), (sliced, ids)):
        stopped(MultiTokenPrediction((0.5, 0.25))).fit(net, DataLoader([batch] * 3, batch_size=None))
    for (name, p), q in zip(plain.named_parameters(), sliced.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-12, msg=name)


class Changing(TinyGPT):
    """From its second batch on, half of its targets are no labels."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, targets = self(batch["input_ids"]), batch["labels"]
        if batch_idx:
            targets = targets.clone()
            targets[:, ::2] = IGNORED
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_further_tokens_of_a_later_batch_count_only_where_the_target_is_the_label() -> None:
    torch.manual_seed(0)
    net, batch = Changing(2, dropout=0.0).double(), make_batch("tiny_gpt", 3, 12)
    technique = MultiTokenPrediction((1.0,), heads="shared")
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)
    stopped(technique, max_steps=2).fit(net, DataLoader([batch] * 2, batch_size=None))  # pyright: ignore[reportArgumentType]
    at = torch.arange(1, 11, 2)  # the positions whose target is the label, and that have a further one
    z, y = net(batch["input_ids"])[:, at].detach(), batch["labels"][:, at + 1]
    torch.testing.assert_close(technique.report()["loss_2"], F.cross_entropy(z.flatten(0, 1), y.flatten()))


def test_a_token_counts_if_no_label_up_to_it_is_ignored() -> None:
    labels = torch.tensor([[1, 2, -100, 4, 5, 6], [7, 8, 9, 1, 2, 3]])
    places = torch.arange(12).view(2, 6)
    assert targets_ahead(labels, places, 1, -100).tolist() == labels.tolist()
    assert targets_ahead(labels, places, 2, -100).tolist() == [[2, -100, -100, 5, 6, -100], [8, 9, 1, 2, 3, -100]]
    found = targets_ahead(labels, places[:, 2:].flip(1), 3, -100)  # in another order, as after a selection
    assert found.tolist() == [[-100, -100, 6, -100], [-100, -100, 3, 2]]
    assert targets_ahead(labels, torch.tensor([-1, 0]), 1, -100).tolist() == [-100, 1]


def test_weights_decay_as_in_the_speedrun() -> None:
    spans = [(1 / 3, 2 / 3), (0.0, 1 / 3)]
    found = [
        [weight_at(u, w, s) for w, s in zip((0.5, 0.25), spans, strict=True)] for u in (0.0, 1 / 6, 1 / 3, 0.5, 1.0)
    ]
    expected = [[0.5, 0.25], [0.5, 0.125], [0.5, 0.0], [0.25, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    technique = MultiTokenPrediction((0.5, 0.25), decay=[(0.25, 0.75), (0, 0.5)])
    stopped(technique, max_steps=4).fit(TinyGPT(2, dropout=0.0), loader("tiny_gpt"))  # its last step has u = 3/4
    assert technique.report()["weight_2"] == technique.report()["weight_3"] == 0.0
    assert not {"loss_2", "loss_3"} & {*technique.report()}
    with pytest.raises(ValueError, match="no end"):
        stopped(technique, max_steps=-1, max_epochs=-1).fit(TinyGPT(2), loader("tiny_gpt"))


def test_export_and_shared_heads_give_the_plain_module() -> None:
    plain = TinyGPT(2)
    ours = eff.apply(copy.deepcopy(plain), MultiTokenPrediction())
    nn.init.normal_(ours.head.ahead_2)  # pyright: ignore[reportArgumentType]
    ids = make_batch("tiny_gpt", 2)["input_ids"]
    assert torch.equal(ours.eval()(ids), plain.eval()(ids))  # the next token alone
    exported = eff.export(ours)
    assert exported.state_dict().keys() == plain.state_dict().keys() and type(exported.head) is nn.Linear
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in exported.state_dict().items())
    shared = eff.apply(copy.deepcopy(plain), MultiTokenPrediction(heads="shared"))
    plain.load_state_dict(shared.state_dict())


class Tied(TinyGPT):
    """Logits are products with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__(2, dropout=0.0)
        self.head = None  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, ids: Tensor) -> Tensor:
        assert self.blocks is not None
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


class Capped(TinyGPT):
    """Its loss is of capped logits of the positions that count, in float32."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, labels = 5.0 * torch.tanh(self(batch["input_ids"]).float() / 5.0), batch["labels"]
        return F.nll_loss(logits[:, 2:].flatten(0, 1).log_softmax(-1), labels[:, 2:].flatten(), reduction="sum") / 90


@pytest.mark.parametrize("cls", [Tied, Capped])
def test_losses_further_from_the_output_layer_are_followed(cls: type[TinyGPT]) -> None:
    technique, seen = MultiTokenPrediction((1.0,)), Losses()
    torch.manual_seed(0)
    net = cls() if cls is Tied else cls(2, dropout=0.0)
    batch = make_batch("tiny_gpt", 3, 12)
    with torch.no_grad():
        logits = net(batch["input_ids"])
        plain = (
            net.training_step(batch, 0)
            if cls is Capped
            else F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        )
        if cls is Capped:
            logits = 5.0 * torch.tanh(logits / 5.0)[:, 2:]
        rows = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, -logits.shape[1] + 1 :].flatten(), reduction="none"
        )
        further = rows.sum() / 90 if cls is Capped else rows.mean()
    trainer(technique, seen, max_steps=1).fit(net, DataLoader([batch], batch_size=None))  # pyright: ignore[reportArgumentType]
    if cls is Capped:
        further = rows.sum()  # the call sums, and the module divides
        torch.testing.assert_close(seen.losses[0], plain + further / 90)
    else:
        torch.testing.assert_close(seen.losses[0], plain + further)
    torch.testing.assert_close(technique.report()["loss_2"], further)


class Another(TinyGPT):
    """Its loss is of another layer's output than what it returns."""

    def __init__(self) -> None:
        super().__init__(2)
        self.other = nn.Linear(16, VOCAB)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.other(self.embed(batch["input_ids"])).flatten(0, 1), batch["labels"].flatten())


class Moved(TinyGPT):
    """It maps labels to other classes."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"]).flatten(0, 1)
        return F.cross_entropy(logits, (batch["labels"].flatten() + 1) % VOCAB)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Another, "is not of the output of head"),
        (lambda: Moved(2), "are not the labels .* at their positions"),
    ],
)
def test_losses_of_other_tokens_are_refused(net: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(MultiTokenPrediction(), max_steps=1).fit(net(), loader("tiny_gpt"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": [-1.0]}, r"MultiTokenPrediction\(weights="),
        ({"decay": [(0, 1)]}, r"for each of 2 weights"),
        ({"decay": [(0, 1), (0.5, 0.5)]}, r"a pair \(a, b\) with a < b"),
        ({"heads": "none"}, r"heads='none'"),
        ({"head": "blocks"}, "has no module of this path with a weight"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eff.apply(TinyGPT(2), MultiTokenPrediction(**settings))


def test_what_computes_the_output_layer_too_is_refused() -> None:
    with pytest.raises(ValueError, match="both compute the output layer"):
        trainer(MultiTokenPrediction(), FusedLinearCrossEntropy(), max_steps=1).fit(TinyGPT(2), loader("tiny_gpt"))


def test_validation_is_of_the_next_token() -> None:
    class Validated(TinyGPT):
        found: Tensor

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.found = F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    net = Validated(2, dropout=0.0)
    trainer(MultiTokenPrediction(), max_epochs=1, limit_val_batches=1).fit(
        net, loader("tiny_gpt"), loader("tiny_gpt", shuffle=False)
    )
    batch = next(iter(loader("tiny_gpt", shuffle=False)))
    with torch.no_grad():
        expected = F.cross_entropy(eff.export(net)(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(net.found, expected)
    assert batch["labels"].shape[1] == LENGTH
