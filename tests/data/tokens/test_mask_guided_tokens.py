"""MaskGuidedTokens: masks are Grad-CAM's, the others bypass the blocks, a mask of ones is the plain network."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff.data.tokens.mask_guided_tokens import MaskGuidedTokens, grad_cam, kept_patches, masked_in
from tests.cases import Case, classifier
from tests.data.tokens.images import PATCHES, B, MeanOfPatches, Net, Registers, gradients, hugging_face
from tests.models import loader, make_batch, module, trainer
from tests.runs import differences, final_state, fit, fit_yaml

_NO_IMAGES = "found no images in the batch"

CASES = {
    "MaskGuidedTokens": Case(
        active=lambda: MaskGuidedTokens(keep=0.5),
        neutral=lambda: MaskGuidedTokens(keep=1.0),
        model="vit",
        refuses=dict.fromkeys(("gpt2", "llama", "bert", "tiny_gpt"), _NO_IMAGES),
        lost=(classifier, "classifier", r"has the shape \(4, 8\); expected \(B, T, D\)|found no images"),
    )
}


class Noting(MaskGuidedTokens):
    """Remembers the masks of each step."""

    def attach(self, session: Any) -> None:
        super().attach(session)
        self.masks: list[Tensor] = []

    def on_batch_end(self, session: Any, batch_idx: int) -> None:
        assert self._masks is not None
        self.masks.append(self._masks)
        super().on_batch_end(session, batch_idx)


class Ones(MaskGuidedTokens):
    """A mask of ones, which goes through everything that another would."""

    def _note(self, step: Any, cam: Tensor, tokens: int) -> None:
        self._full, self._masks = tokens, torch.arange(cam.shape[1]).expand(len(cam), -1)


def reference_masks(net: nn.Module, loss: Any, last: nn.Module, before: int, count: int, keep: int) -> list[list[int]]:
    """The places of the patches that Grad-CAM finds, sample by sample in plain Python, by a whole backward pass."""
    held: list[Tensor] = []

    def note(m: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden.retain_grad()
        held.append(hidden)

    handle = last.register_forward_pre_hook(note, with_kwargs=True)
    loss().backward()
    handle.remove()
    (a,) = held
    assert a.grad is not None
    found = []
    for x, g in zip(a.detach().double(), -a.grad.double(), strict=True):
        x, g = x[before : before + count], g[before : before + count]
        alpha = [float(sum(g[i, k] for i in range(count))) / count for k in range(x.shape[1])]
        cam = [sum(alpha[k] * float(x[i, k]) for k in range(len(alpha))) for i in range(count)]
        found.append(sorted(sorted(range(count), key=lambda i: -cam[i])[:keep]))
    net.zero_grad()
    return found


# -- the rule


def test_rules_by_hand() -> None:
    a = torch.tensor([[[1.0, 2.0], [0.0, 1.0], [-1.0, 0.0]]])
    g = torch.tensor([[[3.0, 0.0], [0.0, 0.0], [0.0, -3.0]]])
    # alpha = (1, -1)
    assert grad_cam(a, g).tolist() == [[-1.0, -1.0, -1.0]]
    assert grad_cam(a, g * torch.tensor([1.0, 0.0])).tolist() == [[1.0, 0.0, -1.0]]
    cam = torch.tensor([[0.1, 0.9, 0.5, 0.9], [0.0, 0.0, 0.0, 0.0]])
    assert masked_in(cam, 2).tolist() == [[1, 3], [0, 1]]
    assert [kept_patches(n, 0.5) for n in (16, 1, 3)] == [8, 1, 2]


@pytest.mark.parametrize("full", [(0, 1), (1, 1), (0, 2)])
@pytest.mark.parametrize("cls", [Net, MeanOfPatches, Registers])
def test_gradients_are_those_of_masked_blocks_and_the_path_around(cls: type[Net], full: tuple[int, int]) -> None:
    """Against the module's own parts: masked blocks on rows picked by hand, which are put back beside the others."""
    first, last = full
    technique = Noting(keep=0.5, full_first=first, full_last=last)
    got = gradients(cls(), technique)
    before = cls.before
    batch = make_batch("vit", B)
    other = cls()
    expected_masks = reference_masks(
        other, lambda: other.training_step(batch, 0), other.blocks[-1], before, PATCHES, PATCHES // 2
    )
    assert technique.masks[0].tolist() == expected_masks
    total = PATCHES + before + cls.after
    x = other.embed(batch["pixel_values"])
    for i, block in enumerate(other.blocks):
        if not first <= i < len(other.blocks) - last:
            x = block(x)
            continue
        rows = []
        for row, mask in zip(x, expected_masks, strict=True):
            at = [*range(before), *(before + p for p in mask), *range(before + PATCHES, total)]
            new = block(row[at][None])[0]
            rows.append(torch.stack([new[at.index(j)] if j in at else row[j] for j in range(total)]))
        x = torch.stack(rows)
    F.cross_entropy(other.head(other.pool(x)), batch["labels"]).backward()
    plain = gradients(cls())
    moved = 0.0
    for name, p in other.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)
        moved = max(moved, float((got[name] - plain[name]).abs().sum()))
    assert moved > 1e-3


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2_with_registers"])
def test_hugging_face_models(name: str) -> None:
    """The masks by a whole backward pass, and how many tokens each block gets."""
    special = {"vit": 1, "deit": 2, "dinov2_with_registers": 5}[name]
    net, technique, lengths = hugging_face(name), Noting(keep=0.5), []
    blocks = next(list(m) for m in net.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    for block in blocks:
        norm = next(m for m in block.modules() if isinstance(m, nn.LayerNorm))  # which gets what the block computes
        norm.register_forward_hook(lambda m, args, out: lengths.append(out.shape[1]))
    gradients(net, technique)
    assert lengths[-3:] == [8 + special, 8 + special, 16 + special]
    other = hugging_face(name)
    blocks = next(list(m) for m in other.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    batch = make_batch("vit", B)
    masks = reference_masks(other, lambda: other.model(**batch).loss, blocks[-1], special, PATCHES, PATCHES // 2)
    assert technique.masks[0].tolist() == masks


@pytest.mark.parametrize("name", ["net", "vit"])
def test_a_mask_of_ones_is_the_plain_network_bit_for_bit(name: str) -> None:
    def build() -> Any:
        return Net() if name == "net" else hugging_face("vit")

    plain = gradients(build())
    for technique in (Ones(keep=0.5), MaskGuidedTokens(keep=1.0)):
        got = gradients(build(), technique)
        assert all(torch.equal(got[key], grad) for key, grad in plain.items())
    whole = final_state(*fit("vit", lambda: [MaskGuidedTokens(keep=1.0)]))
    assert differences(whole, final_state(*fit("vit", list))) == []


def test_evaluation_sees_all_patches_and_the_pass_leaves_no_trace() -> None:
    """Random numbers stand where a plain run leaves them, and counters of the module at its own steps."""

    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.calls += 1
            torch.rand(3)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def run(*techniques: Any) -> tuple[Counts, Any, Tensor]:
        torch.manual_seed(3)
        net, data = Counts(), DataLoader(cast(Any, [make_batch("vit", B)] * 2), batch_size=None)
        torch.manual_seed(3)
        t = trainer(*techniques, max_steps=2, limit_val_batches=1, val_check_interval=2, num_sanity_val_steps=0)
        t.fit(net, data, DataLoader(cast(Any, [make_batch("vit", B)]), batch_size=None))
        return net, t, torch.get_rng_state()

    (net, t, state), (plain, other, expected) = run(MaskGuidedTokens()), run()
    assert net.calls == plain.calls == 3  # validation calls it, too
    assert torch.equal(state, expected)
    assert t.callback_metrics["val_loss"].item() == other.callback_metrics["val_loss"].item()


class Dots(torch.utils.data.Dataset[Any]):
    """Few images, by index."""

    def __init__(self) -> None:
        self.batch = make_batch("vit", 8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return {key: value[i] for key, value in self.batch.items()}


@pytest.mark.parametrize(("reuse", "found"), [(0, 8), (1, 4), (3, 2)])
def test_masks_are_used_again_for_so_many_epochs(reuse: int, found: int) -> None:
    """Of 4 epochs of 2 batches."""
    technique = Noting(reuse=reuse)
    t = trainer(technique, max_epochs=4)
    t.fit(Net(), DataLoader(Dots(), batch_size=4))
    assert technique.report()["found"] == found
    again = [torch.equal(technique.masks[i], technique.masks[i + 2]) for i in range(0, 6)]
    assert all(again[:2]) if reuse else True
    assert t.callback_metrics is not None


def test_reuse_resumes(tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [MaskGuidedTokens(reuse=2)]

    whole = final_state(*fit("vit", build, directory=tmp_path))
    for step in (3, 7):
        resumed = fit("vit", build, resume=tmp_path / f"step={step}.ckpt")
        assert differences(final_state(*resumed), whole) == []


# -- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0.0}, r"keep=0.0\): expected a number in \(0, 1\]: the fraction of the patches"),
        ({"keep": 1.5}, r"keep=1.5\)"),
        ({"reuse": -1}, r"reuse=-1\): expected an integer >= 0: the number of further epochs"),
        ({"full_last": 0.5}, r"full_last=0.5\): expected an integer >= 0: the number of blocks"),
        ({"full_first": True}, r"full_first=True\)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"MaskGuidedTokens\(" + message):
        MaskGuidedTokens(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"full_first": 2}, r"the range \[2:-1\] contains no block"),
        ({"keep": 0.99}, "16 patches per image and would keep all of them"),
        ({"reuse": 1}, r"reuse=1\): the samples of a batch are unknown, because the training loader"),
    ],
)
def test_what_cannot_work_is_refused_before_any_weight_changes(arguments: dict[str, Any], message: str) -> None:
    net = Net()
    before = {name: p.clone() for name, p in net.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        trainer(MaskGuidedTokens(**arguments), max_steps=2).fit(
            net, DataLoader(cast(Any, [make_batch("vit", B)] * 2), batch_size=None)
        )
    assert all(torch.equal(p, before[name]) for name, p in net.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*returned .None")
def test_it_waits_for_the_first_step_that_returns_a_loss() -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    technique = MaskGuidedTokens()
    batches = DataLoader(cast(Any, [make_batch("vit", B)] * 3), batch_size=None)
    trainer(technique, max_steps=3).fit(Skips(), batches)
    assert technique._found == 2


def test_texts_are_refused() -> None:
    with pytest.raises(ValueError, match=_NO_IMAGES):
        trainer(MaskGuidedTokens(), max_steps=1).fit(module("tiny_gpt"), loader("tiny_gpt"))


def test_a_yaml_trains(tmp_path: Path) -> None:
    fit_yaml(
        tmp_path,
        "MaskGuidedTokens",
        {"keep": 0.5, "reuse": 2},
        model="examples.vit.module.ViT",
        data="examples.vit.data.Digits",
        max_steps=3,
        limit_val_batches=0,
    )
