"""TokenDropping: running losses of the vocabulary, the tokens that they choose, and special ones that are always kept."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff.data.tokens.token_dropping import FIRST_IMPORTANCE, TokenDropping, chosen, updated
from tests.cases import Case, classifier
from tests.models import LENGTH, VOCAB, TinyGPT, hugging_face, loader, make_batch, trainer
from tests.runs import differences, final_state, fit

CASES = {
    "TokenDropping": Case(
        active=lambda: TokenDropping(keep=0.4, beta=0.9),
        neutral=lambda: TokenDropping(keep=1.0),
        refuses={"vit": r"no nn.Embedding was called on the ids of the 17 tokens"},
        lost=(classifier, "classifier", r"has the shape \(4, 8\); expected \(B, T, D\)"),
    )
}


class Blocks(pl.Callback):
    """Of each training step, for each block the tokens that it changed, (B, T)."""

    def __init__(self) -> None:
        self.found: dict[int, dict[int, Tensor]] = {}
        self._handles: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        blocks = next(list(m) for m in pl_module.modules() if isinstance(m, nn.ModuleList))

        def hook(i: int) -> Any:
            def note(block: Any, args: Any, kwargs: Any, output: Any) -> None:
                if torch.is_grad_enabled():
                    entered = args[0] if args else kwargs["hidden_states"]
                    left = output[0] if isinstance(output, tuple) else output
                    self.found.setdefault(trainer.global_step, {})[i] = (entered != left).any(-1)

            return note

        self._handles = [b.register_forward_hook(hook(i), with_kwargs=True) for i, b in enumerate(blocks)]

    def on_train_end(self, *args: Any) -> None:
        for handle in self._handles:
            handle.remove()


# -- the rule


def test_the_running_loss_of_an_id_stays_where_it_was_no_target() -> None:
    m = updated(torch.tensor([10.0, 10.0, 2.0]), torch.tensor([3.0, 0.0, 8.0]), torch.tensor([1.0, 0.0, 4.0]), beta=0.9)
    assert torch.allclose(m, torch.tensor([9.3, 10.0, 2.0]))
    assert m[1] == 10.0


def test_the_most_important_tokens_are_chosen_and_special_ones_first() -> None:
    importance = torch.tensor([[1.0, 5.0, 3.0, 3.0, 9.0], [2.0, 1.0, 1.0, 1.0, 0.0]])
    none = torch.zeros(2, 5, dtype=torch.bool)
    assert chosen(importance, none, none, 3).sort().values.tolist() == [[1, 2, 4], [0, 1, 2]]
    special, padding = none.clone(), none.clone()
    special[0, 0] = special[1, 4] = padding[0, 4] = True
    assert chosen(importance, special, padding, 2).sort().values.tolist() == [[0, 1], [0, 4]]
    special[1] = torch.tensor([True, False, True, True, True])
    assert chosen(importance, special, padding, 2).sort().values.tolist() == [[0, 1, 2, 3], [0, 2, 3, 4]]


# -- T: the running loss equals an independent reference


class Frozen(TinyGPT):
    """Does not move, so that losses can be computed again."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_running_losses_are_those_of_a_loop_over_all_targets() -> None:
    """Of a language model with labels that are ignored: each id's mean loss by batch, one by one."""
    batches = [make_batch("tiny_gpt", seed=i) for i in range(4)]
    for batch in batches:
        batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.5, -100)
    losses: list[Tensor] = []

    class Notes(Frozen):
        def forward(self, ids: Tensor) -> Tensor:
            logits = super().forward(ids)
            if torch.is_grad_enabled():
                losses.append(logits.detach())
            return logits

    technique = TokenDropping(keep=0.5, beta=0.8)
    trainer(technique, max_steps=4).fit(Notes(dropout=0.0), DataLoader(batches, batch_size=None))
    expected = [FIRST_IMPORTANCE] * VOCAB
    assert len(losses) == 4
    for logits, batch in zip(losses, batches, strict=True):
        p = logits.double().softmax(-1)
        for v in range(VOCAB):
            at = [(b, t) for b, t in (batch["labels"] == v).nonzero().tolist()]
            if at:
                mean = sum(-float(p[b, t, v].log()) for b, t in at) / len(at)
                expected[v] = 0.8 * expected[v] + 0.2 * mean
    assert technique.importance is not None
    torch.testing.assert_close(technique.importance.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5)
    assert sum(value != FIRST_IMPORTANCE for value in expected) > 20
    assert float(technique.report()["importance"]) == pytest.approx(sum(expected) / VOCAB, rel=1e-5)


def test_two_passes_and_blocks_that_run_again_count_once() -> None:
    """SAM's second pass, and what checkpoints compute again, add no losses."""
    found = []
    batch = make_batch("tiny_gpt")
    for more in ((), (eff.SharpnessAwareMinimization(rho=0.1),), (eff.Rematerialization(policy="full"),)):
        technique = TokenDropping(keep=0.5, beta=0.5)
        torch.manual_seed(0)
        trainer(technique, *more, max_steps=1).fit(Frozen(dropout=0.0), DataLoader([batch], batch_size=None))
        found.append(technique.importance)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# -- T: special tokens are always kept


@pytest.mark.parametrize("name", ["bert", "tiny_gpt", "llama"])
def test_middle_blocks_run_on_the_tokens_that_count_most(name: str) -> None:
    """In the middle the same tokens for all blocks: special ones, then by their running losses at the step's beginning."""
    blocks, special, padding = Blocks(), [3, 7], [11, 5]
    technique = TokenDropping(keep=0.4, beta=0.5, special_ids=special, padding_ids=padding)
    before: list[Tensor] = []
    batches: list[Any] = []

    class Notes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, net: Any, batch: Any, *args: Any) -> None:
            m = technique.importance
            before.append(torch.full((VOCAB,), FIRST_IMPORTANCE) if m is None else m.clone())
            batches.append(batch["input_ids"])

    fit(name, lambda: [technique], callbacks=[blocks, Notes()], max_steps=6)
    differing = 0
    for step, m in enumerate(before):
        changed = blocks.found[step]
        assert changed[0].all() and changed[3].all()
        assert torch.equal(changed[1], changed[2])
        ids = batches[step]
        for row, picked in zip(ids.tolist(), changed[1], strict=True):
            rank = sorted(
                range(LENGTH),
                key=lambda t: (row[t] not in special, row[t] in padding, -float(m[row[t]]), t),
            )
            kept = set(picked.nonzero().flatten().tolist())
            assert {t for t in range(LENGTH) if row[t] in special} <= kept
            assert kept == set(rank[: len(kept)]) and len(kept) >= 12
            differing += kept != set(range(12))
    assert differing > 4


def test_special_ids_of_a_config_and_of_more_than_there_is_room_for() -> None:
    net = hugging_face("bert")
    net.model.config.cls_token_id, net.model.config.pad_token_id, net.model.config.mask_token_id = 4, 9, None
    batch = make_batch("bert")
    batch["input_ids"][1, :20] = 4
    blocks, technique = Blocks(), TokenDropping(keep=0.25)
    trainer(technique, blocks, max_steps=1).fit(net, DataLoader([batch], batch_size=None))
    kept = blocks.found[0][2]
    assert (kept.sum(1) == 20).all() and kept[1, :20].all()
    assert technique._sets[0].nonzero().flatten().tolist() == [4]
    assert technique._sets[1].nonzero().flatten().tolist() == [9]


def test_evaluation_never_drops() -> None:
    class Lengths(Frozen):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.position.weight[: ids.shape[1]]
            assert self.blocks is not None
            for i, block in enumerate(self.blocks):
                out = block(x)
                if not torch.is_grad_enabled() and self.trainer.validating:
                    assert torch.equal(out, type(block).forward(block, x)), i
                x = out
            return self.head(self.norm(x))

    t = trainer(TokenDropping(), max_steps=2, limit_val_batches=1, val_check_interval=1)
    t.fit(Lengths(dropout=0.0), loader("tiny_gpt", 8), loader("tiny_gpt", 4))
    assert t.callback_metrics["val_loss"].isfinite()


def test_the_middle_is_that_of_the_blocks_that_run() -> None:
    blocks = Blocks()
    growth = eff.ProgressiveStacking(stages=[(0.0, 1), (0.5, 4)])
    fit("tiny_gpt", lambda: [TokenDropping(keep=0.4), growth], callbacks=[blocks], max_steps=8)
    for step, changed in blocks.found.items():
        assert [bool(c.all()) for _, c in sorted(changed.items())] == (
            [True] if step < 4 else [True, False, False, True]
        )


def test_losses_are_in_checkpoints(tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [TokenDropping(keep=0.4, beta=0.5)]

    whole = final_state(*fit("tiny_gpt", build, directory=tmp_path))
    path = next(tmp_path.glob("step=7*.ckpt"))
    assert differences(whole, final_state(*fit("tiny_gpt", build, resume=path))) == []
    held = torch.load(path, weights_only=True)["callbacks"]["TokenDropping"]["importance"]
    assert held.shape == (VOCAB,) and (held != FIRST_IMPORTANCE).any()


# -- what is refused


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"keep": 0.0}, r"keep=0.0.*\(0, 1\]"),
        ({"beta": 1.0}, r"beta=1.0.*\[0, 1\)"),
        ({"special_ids": [-1]}, r"special_ids=\[-1\]"),
        ({"special_ids": 101}, r"special_ids=101.*expected a list"),
        ({"padding_ids": "0"}, "padding_ids='0'"),
        ({"full_last": -1}, "full_last=-1"),
        ({"full_first": 1.5}, "full_first=1.5"),
        ({"labels": "labels"}, r"Write a list, such as \['labels'\]"),
    ],
)
def test_arguments_out_of_their_range(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"TokenDropping.*{message}"):
        TokenDropping(**kwargs)


class TwoTexts(TinyGPT):
    """Two texts a step, or one twice, through blocks that may be checkpointed."""

    def __init__(self, other: int, *, checkpointed: bool) -> None:
        super().__init__(dropout=0.0)
        self.other, self.checkpointed = other, checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks or ():
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        texts = (batch["input_ids"], (batch["input_ids"] + self.other) % VOCAB)
        return sum(
            (F.cross_entropy(self(text).flatten(0, 1), batch["labels"].flatten()) for text in texts), torch.zeros(())
        )


def test_several_texts_in_checkpointed_blocks_are_refused() -> None:
    """Since a block that runs again would drop the tokens of the last."""

    def run(other: int, *, checkpointed: bool) -> Tensor:
        torch.manual_seed(0)
        net = TwoTexts(other, checkpointed=checkpointed)
        trainer(TokenDropping(beta=0.5), max_steps=3).fit(net, loader("tiny_gpt", shuffle=False))
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert run(5, checkpointed=False).isfinite().all()
    torch.testing.assert_close(run(0, checkpointed=True), run(0, checkpointed=False))
    with pytest.raises(
        ValueError, match=r"on several texts, and block 2 is recomputed .* Disable gradient checkpointing"
    ):
        run(5, checkpointed=True)


def test_other_losses_and_modules_are_refused() -> None:
    class Classifies(TinyGPT):
        """Two classes of a whole sequence."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self(batch["input_ids"]).mean(dim=1)[:, :2]
            return F.cross_entropy(logits, batch["labels"][:, 0] % 2)

    with pytest.raises(ValueError, match="have 2 classes, but the embedding has 61 ids"):
        trainer(TokenDropping(), max_steps=1).fit(Classifies(), loader("tiny_gpt"))
    with pytest.raises(ValueError, match="the id 61 is not in the embedding of 61 ids"):
        fit("tiny_gpt", lambda: [TokenDropping(special_ids=[61])])

    class ByHand(TinyGPT):
        """Looks its embedding up by itself."""

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed.weight[ids] + self.position.weight
            assert self.blocks is not None
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    with pytest.raises(ValueError, match=r"no nn.Embedding was called on the ids of the 32 tokens .*but on nothing"):
        trainer(TokenDropping(), max_steps=1).fit(ByHand(), loader("tiny_gpt"))
