"""DOTAAttention: as many pairs of each row as asked for, exact on these, and a detector that its loss trains."""

import copy
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import KFAC, DOTAAttention, Rematerialization
from lightning_eff.model.attention.dota_attention import KEY, QUERY, Detecting, sparse_projection, strongest
from tests.cases import Case, classifier
from tests.model.attention.nets import HUGGING, Checkpointed, Net, a_call, loss_of, reference, weights_of
from tests.models import TinyGPT, loader, trainer
from tests.runs import fit_yaml

CASES = {
    "DOTAAttention": Case(
        active=lambda: DOTAAttention(share=0.3, rank=4),
        neutral=lambda: DOTAAttention(share=1.0),
        architecture=True,
        stays="attention to all keys computes something else",
        refuses={"classifier": "found no attention in TinyClassifier"},
        lost=(classifier, "classifier", "found no attention in TinyClassifier"),
    )
}


def detecting(share: float, rank: int = 3, heads: int = 4, key_heads: int = 2) -> Detecting:
    """Of heads of 8 features."""

    class Made(Detecting):
        pass

    torch.manual_seed(0)
    made = Made()
    made.who, made.share = "DOTAAttention", share
    made.register_buffer("dota_projection", torch.empty(8, rank, dtype=torch.float64))
    for name, count in ((QUERY, heads), (KEY, key_heads)):
        made.register_parameter(name, nn.Parameter(torch.empty(count, rank, rank, dtype=torch.float64)))
    made.begin()
    return made


def test_each_row_keeps_its_share_of_the_largest() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    for share in (0.01, 0.3, 1.0):
        kept = strongest(scores, share)
        for i in range(9):
            count = math.ceil(share * (i + 1) - 1e-6)
            for row, keep in zip(scores[:, :, i].flatten(0, 1), kept[:, :, i].flatten(0, 1), strict=True):
                assert {*keep.nonzero().flatten().tolist()} == {*row.topk(count).indices.tolist()}


@pytest.mark.parametrize("causal", [True, False])
def test_all_keys_are_exact_attention_and_kept_weights_sum_to_one(causal: bool) -> None:
    padding = None if causal else (torch.arange(13) < torch.tensor([[13], [7]]))[:, None, None]
    call = a_call(causal=causal, mask=padding)
    wanted = reference(call.query, call.key, call.value, call.mask, causal=causal, scale=call.scale)
    torch.testing.assert_close(detecting(1.0).attends(call), wanted, rtol=1e-9, atol=1e-9)
    some, whole = weights_of(detecting(0.4).attends, call), call.scores().softmax(-1)
    torch.testing.assert_close(some.sum(-1), torch.ones_like(some.sum(-1)))
    kept = some > 0
    assert torch.equal(kept.sum(-1), ((whole > 0).sum(-1) * 0.4).ceil().long())
    torch.testing.assert_close(some, whole * kept / (whole * kept).sum(-1, keepdim=True))


def test_the_detector_is_a_product_of_low_rank_that_is_right_on_average() -> None:
    made, call = detecting(0.5), a_call()
    p, w_q, w_k = made.dota_projection, made.get_parameter(QUERY), made.get_parameter(KEY)
    with torch.no_grad():
        for w in (w_q, w_k):
            w.normal_()
    got = made.detected(call)
    for h in range(4):
        expected = (call.query[:, h] @ p @ w_q[h]) @ (call.key[:, h // 2] @ p @ w_k[h // 2]).mT * call.scale  # type: ignore[operator]
        torch.testing.assert_close(got[:, h], expected)
    assert max(int(torch.linalg.matrix_rank(x)) for x in got.detach().flatten(0, 1)) == 3
    torch.manual_seed(0)
    mean = torch.stack([(m := sparse_projection(6, 4)) @ m.T for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, torch.eye(6), rtol=0, atol=0.06)


def test_the_loss_trains_the_detector_and_its_error_falls() -> None:
    """The step's loss has the error of each layer, once, also where blocks run again."""
    errors: list[float] = []

    class Frozen(TinyGPT):
        """All but detectors stand still."""

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam([p for name, p in self.named_parameters() if "dota" in name], lr=0.02)

    class Watch(DOTAAttention):
        def on_batch_end(self, session: Any, batch_idx: int) -> None:
            errors.append(float(self.report()["error"]))

    torch.manual_seed(0)
    net, technique = Frozen(num_layers=2, dropout=0.0), Watch(share=0.5, rank=4, weight=1.0)
    trainer(technique, max_steps=25, max_epochs=-1).fit(net, loader("tiny_gpt", 4, shuffle=False))
    assert errors[-1] < 0.5 * errors[0] and technique.report()["attentions"] == 2
    assert not any("collected" in m.__dict__ for m in net.modules())


def test_the_error_is_the_mean_square_over_pairs_that_may_be_seen_times_its_weight() -> None:
    class Nothing(TinyGPT):
        """A step whose own loss has no gradient."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * 0

        def on_after_backward(self) -> None:
            seen.append(sum(float(p.grad.abs().sum()) for p in self.parameters() if p.grad is not None))

    seen: list[float] = []
    for weight in (0.0, 0.5, 1.0):
        torch.manual_seed(0)
        net = Nothing(num_layers=1, dropout=0.0)
        trainer(DOTAAttention(rank=2, weight=weight), max_steps=1).fit(net, loader("tiny_gpt", shuffle=False))
    assert seen[0] == 0.0 < seen[1] and seen[2] == pytest.approx(2 * seen[1], rel=1e-4)

    class Again(Nothing, Checkpointed):
        """Its blocks run again in the backward pass."""

    torch.manual_seed(0)
    net = Again(num_layers=1, dropout=0.0)
    trainer(DOTAAttention(rank=2, weight=1.0), max_steps=1).fit(net, loader("tiny_gpt", shuffle=False))
    assert seen[3] == pytest.approx(seen[2], rel=1e-5)
    assert not any("collected" in m.__dict__ for m in net.modules())
    made, call = detecting(0.5), a_call(causal=True)
    made.__dict__["collected"] = found = list[tuple[Tensor, bool]]()
    made.attends(call)
    below = torch.ones(13, 13).tril().bool()
    wanted = (call.scores() - made.detected(call))[:, :, below].square().mean()
    ((error, trains),) = found
    assert trains
    torch.testing.assert_close(error.double(), wanted, rtol=1e-5, atol=1e-7)


def test_what_a_backward_pass_within_the_step_runs_again_is_in_no_loss() -> None:
    """KFAC's own, of blocks that are run again: their errors have no graph that lasts."""
    pl.seed_everything(1, verbose=False)
    technique, net = DOTAAttention(rank=2, weight=1.0), TinyGPT(num_layers=2, dropout=0.0)
    t = trainer(technique, KFAC(), Rematerialization(), max_steps=2)
    t.fit(net, loader("tiny_gpt", shuffle=False))
    assert t.global_step == 2 and float(technique.report()["error"]) > 0


@pytest.mark.parametrize("name", [*HUGGING, "plain", "module", "encoder"])
def test_modules_with_a_detector_of_full_rank_keep_what_is_strongest(name: str) -> None:
    """Of all keys but a ten-thousandth, which rounds up to all, the loss is what it was; of few it is not."""
    net, loss = loss_of(name)
    plain = float(loss().detach())
    found: list[float] = []
    for share in (0.9999, 0.1):
        other = copy.deepcopy(net)
        eff.apply(other, DOTAAttention(share=share, rank=4))
        assert sum(isinstance(m, Detecting) for m in other.modules()) >= 2
        part = "model" if hasattr(net, "model") else "blocks"  # which the loss is computed by
        kept = getattr(net, part)
        setattr(net, part, getattr(other, part))
        found.append(float(loss().detach()))
        setattr(net, part, kept)
    assert found[0] == pytest.approx(plain, abs=1e-9) and found[1] != plain and math.isfinite(found[1])


@pytest.mark.parametrize("settings", [{"share": 0.0}, {"share": 1.5}, {"rank": 0}, {"weight": -1.0}])
def test_other_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"DOTAAttention\(.*expected"):
        DOTAAttention(**settings)
    with pytest.raises(ValueError, match="found no attention in Net"):
        eff.apply(Net("by hand"), DOTAAttention())


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "DOTAAttention", {"rank": 4}, model="TinyGPT", data="Sequences", max_steps=2, keeps_state=False)
