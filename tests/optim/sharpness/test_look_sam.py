"""LookSAM against loops written by hand: what is kept stands upright on the gradient, and k = 1 is SAM."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_eff._core.session import Session
from lightning_eff.optim.sharpness.look_sam import LookSAM, add_direction, orthogonal_part
from lightning_eff.optim.sharpness.sharpness_aware_minimization import SharpnessAwareMinimization
from tests.cases import Case
from tests.core.nop import Nop
from tests.models import Samples, TinyClassifier, flat, loader, trainer
from tests.optim.sharpness.test_sharpness_aware_minimization import (
    AS_SAM,
    Quadratic,
    SeedOnce,
    both,
    dropping,
    ends_as_sam,
    quadratic,
    sam_gradient,
)
from tests.runs import fit, resume_from_batches

CASES = {
    "LookSAM": Case(
        active=lambda: LookSAM(rho=0.1, interval=3),
        neutral=lambda: LookSAM(rho=0.0),
        anywhere=True,
    )
}

# -- the rule


def test_what_is_kept_stands_upright_on_the_gradient_and_makes_up_sams() -> None:
    g = [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    g_s = [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    g_v = orthogonal_part(g_s, g)
    a, s, v = (torch.cat([t.flatten() for t in tensors]) for tensors in (g, g_s, g_v))
    assert abs(v @ a) < 1e-12 * a.norm() * v.norm()
    assert abs(v @ a) < abs(s @ a) / 1e6, "which SAM's own does not"
    cosine = (s @ a) / (s.norm() * a.norm())
    torch.testing.assert_close(v, s - s.norm() * cosine * a / a.norm(), rtol=1e-12, atol=1e-12)  # as in the paper


def test_a_zero_gradient_leaves_sams_own() -> None:
    g_s = [torch.randn(4)]
    assert torch.equal(orthogonal_part(g_s, [torch.zeros(4)])[0], g_s[0])


def test_the_gradient_is_turned_by_as_much_as_its_length() -> None:
    g = [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    v = [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    length = torch.cat([t.flatten() for t in g]).norm()
    expected = [a + 0.7 * length * b for a, b in zip(g, v, strict=True)]
    add_direction(g, v, alpha=0.7)
    torch.testing.assert_close(g, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "mode"), AS_SAM)
def test_every_step_perturbed_is_sam(name: str, mode: str) -> None:
    assert ends_as_sam(LookSAM(rho=0.1, interval=1), name, mode)


# -- the same as a loop written by hand


def test_a_quadratic_is_stepped_along_turned_gradients() -> None:
    h, w = quadratic()
    h = h / 50
    net = Quadratic(h, w)
    technique = LookSAM(rho=0.3, interval=3, alpha=0.5)
    trainer(technique, max_steps=5).fit(net, DataLoader(torch.zeros(5, 1)))
    direction, upright, kept = torch.zeros_like(w), [], []
    for step in range(5):
        g = h @ w
        if step % 3 == 0:
            g_s = h @ (w + 0.3 * g / g.norm())
            g_v = g_s - (g_s @ g) / (g @ g) * g
            upright.append(float(g_v.norm() / g.norm()))
            kept.append(float(direction @ g_v / g_v.norm()))
            direction, g = g_v / g_v.norm(), g_s
        else:
            g = g + 0.5 * g.norm() * direction
        w = w - g
    torch.testing.assert_close(net.w.detach(), w, rtol=1e-9, atol=1e-9)
    report = technique.report()
    assert report["turned"] == 3
    assert float(report["upright"]) == pytest.approx(upright[-1], rel=1e-9) and 0 < upright[-1] < 1
    assert float(report["kept"]) == pytest.approx(kept[-1], rel=1e-9) and 0.1 < kept[-1] < 1


def by_hand(net: Any, batches: list[Any], *, accumulate: int, clip: float, interval: int, alpha: float) -> None:
    """LookSAM over means of ``accumulate`` micro-batches, without Lightning."""
    net.train()
    optimizer, params = net.configure_optimizers(), [p for p in net.parameters() if p.requires_grad]
    torch.manual_seed(100)
    v = torch.zeros(0)
    for step in range(len(batches) // accumulate):
        window = batches[step * accumulate : (step + 1) * accumulate]
        plain, perturbed = [], []
        for batch in window:
            state, buffers = torch.get_rng_state(), {k: b.clone() for k, b in net.named_buffers()}
            gradients, _ = sam_gradient(net, batch, rho=0.0, bf16=False)
            plain.append(torch.cat([g.flatten() for g in gradients]))
            if step % interval == 0:
                torch.set_rng_state(state)
                for k, b in net.named_buffers():
                    b.copy_(buffers[k])
                gradients, _ = sam_gradient(net, batch, rho=0.1, bf16=False)
                perturbed.append(torch.cat([g.flatten() for g in gradients]))
        g = torch.stack(plain).mean(0)
        if step % interval == 0:
            g_s = torch.stack(perturbed).mean(0)
            g_v = g_s - (g_s @ g) / (g @ g) * g
            v, g = g_v / g_v.norm(), g_s
        else:
            g = g + alpha * g.norm() * v
        for p, part in zip(params, g.split([p.numel() for p in params]), strict=True):
            p.grad = part.view_as(p).clone()
        torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()


@pytest.mark.parametrize("name", ["classifier", "tiny_gpt", "vit"])
def test_equals_the_loop_by_hand_over_accumulation_windows(name: str) -> None:
    net, reference = both(name, lambda: dropping(name))
    start = flat(net)
    for each in (net, reference):  # Adam would make much of a rounded gradient
        each.configure_optimizers = lambda each=each: torch.optim.SGD(each.parameters(), lr=0.5)
    batches = loader(name, samples=48, shuffle=False)
    technique = LookSAM(rho=0.1, interval=3, alpha=0.7)
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    trainer(SeedOnce(), technique, max_epochs=1, **settings).fit(net, batches)
    by_hand(reference, list(batches), accumulate=2, clip=0.05, interval=3, alpha=0.7)
    torch.testing.assert_close(flat(net), flat(reference), rtol=1e-4, atol=1e-6)
    assert (flat(net) - start).abs().max() > 1e-3


def test_under_ddp_all_is_of_both_ranks_mean_gradients(two_processes: dict[str, Any]) -> None:
    """Each rank perturbs by its own gradient; the direction is of the means, as is the gradient that is turned."""
    saved = two_processes["sharpness"]["look"]["ranks"]
    pl.seed_everything(3, verbose=False)
    net = TinyClassifier().train()
    optimizer, params = torch.optim.SGD(net.parameters(), lr=0.5), list(net.parameters())
    data = Samples("classifier", 32)
    ranks = [list(DataLoader(data, 4, sampler=DistributedSampler(data, 2, r, shuffle=False))) for r in range(2)]
    states = [torch.Generator().manual_seed(100 + r).get_state() for r in range(2)]
    v = torch.zeros(0)
    for step in range(4):
        found: dict[float, list[Tensor]] = {0.0: [], 0.1: []}
        for r in range(2):
            before = {k: b.clone() for k, b in net.named_buffers()}
            for rho in found:
                torch.set_rng_state(states[r])
                for k, b in net.named_buffers():
                    b.copy_(before[k])
                gradients, _ = sam_gradient(net, ranks[r][step], rho=rho, bf16=False)
                found[rho].append(torch.cat([g.flatten() for g in gradients]))
                after = torch.get_rng_state()
            states[r] = after
        g, g_s = (torch.stack(of).mean(0) for of in found.values())
        if step % 2 == 0:
            g_v = g_s - (g_s @ g) / (g @ g) * g
            v, g = g_v / g_v.norm(), g_s
        else:
            g = g + 0.7 * g.norm() * v
        for p, part in zip(params, g.split([p.numel() for p in params]), strict=True):
            p.grad = part.view_as(p).clone()
        torch.nn.utils.clip_grad_norm_(params, 0.05)
        optimizer.step()
    assert saved[0].keys() == saved[1].keys()
    for key, value in net.named_parameters():
        assert saved[0][key] == saved[1][key]
        torch.testing.assert_close(torch.tensor(saved[0][key]), value.detach(), rtol=1e-4, atol=1e-6)


def test_costs_a_second_pass_every_third_step_alone() -> None:
    class Costs(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            passes.append(technique.session.chain.cost.backward_passes)

    technique, passes = LookSAM(rho=0.1, interval=3), list[int]()
    t = trainer(technique, Costs(), max_steps=7, accumulate_grad_batches=2)
    t.fit(both("classifier")[0], loader("classifier", samples=56))
    assert passes == [1, 2, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 5, 6]
    assert "6 second passes, 4 steps along turned gradients" in technique.summary()


def test_after_blocks_changed_the_next_step_is_perturbed() -> None:
    class Grows(Nop):
        def on_batch_end(self, session: Session, batch_idx: int) -> None:
            if session.trainer.global_step == 4:
                session.blocks_changed(self)

    technique = LookSAM(rho=0.1, interval=3)
    fit("tiny_gpt", lambda: [technique, Grows()], max_steps=6)
    assert technique.state_dict()["passes"] == 3  # in the steps 0, 3 and 4


def test_resumes_within_accumulation_windows(tmp_path: Path) -> None:
    """Also within those of perturbed steps, of which a part of the plain gradient is summed."""
    found = resume_from_batches("classifier", lambda: [LookSAM(rho=0.1, interval=2)], tmp_path, None)
    assert found == {}


def test_gradients_that_are_not_finite_leave_the_direction() -> None:
    class Breaks(Quadratic):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.global_step == 3 else loss

    h, w = quadratic()
    technique = LookSAM(rho=0.3, interval=3)
    trainer(technique, max_steps=4).fit(Breaks(h / 50, w), DataLoader(torch.zeros(5, 1)))
    assert technique.state_dict()["direction"]["w"].norm() == pytest.approx(1.0)


# -- bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rho": -1.0}, r"LookSAM\(rho=-1.0\): expected a finite number >= 0"),
        ({"interval": 0}, r"LookSAM\(interval=0\): expected an integer >= 1"),
        ({"interval": True}, r"LookSAM\(interval=True\): expected an integer >= 1"),
        ({"alpha": -0.1}, r"LookSAM\(alpha=-0.1\): expected a finite number >= 0"),
        ({"alpha": float("inf")}, r"LookSAM\(alpha=inf\): expected a finite number >= 0"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LookSAM(**kwargs)


def test_beside_sam_it_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot train together: both take the gradient at other weights"):
        fit("tiny_gpt", lambda: [LookSAM(), SharpnessAwareMinimization()])
