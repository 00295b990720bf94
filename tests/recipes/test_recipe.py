"""``lightning_eff.recipe``: what it chooses on a module, what it refuses, and what a run with it does."""

import copy
import hashlib
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_eff as eff
from lightning_eff._cli.errors import UsageError
from lightning_eff._core.search_space import RunProfile
from lightning_eff.recipes import trial
from lightning_eff.recipes.resolving import Resolved, resolve
from lightning_eff.recipes.shipped import RECIPES
from lightning_eff.recipes.used import UsedRecipe
from tests.models import TinyClassifier, TinyGPT, flat, loader, module, trainer
from tests.recipes.modules import TinyResNet, images, make

#: By recipe, a module that it is for, and two that it is not for.
SUITS = {"gpt": "tiny_gpt", "masked-lm": "masked", "vit": "vit", "cnn": "cnn"}
OTHERS = {
    "gpt": ("classifier", "cnn"),
    "masked-lm": ("tiny_gpt", "vit"),
    "vit": ("tiny_gpt", "cnn"),
    "cnn": ("vit", "classifier"),
}
VARIANTS = [(name, variant) for name, recipe in RECIPES.items() for variant in recipe.variants]


def names(callbacks: list[Any]) -> list[str]:
    return [type(callback).__name__ for callback in callbacks]


def _sgd(module: pl.LightningModule) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def left_out(resolved: Resolved) -> dict[str, str]:
    return {skip.technique: skip.why for skip in resolved.skips}


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_a_recipe_trains_a_module_that_suits_it(name: str, variant: str) -> None:
    net, data = make(SUITS.get(name, "gpt2"))
    callbacks = eff.recipe(name, net, variant, data=data)
    assert len(callbacks) > 1 and isinstance(callbacks[-1], UsedRecipe)
    before = flat(net).clone()
    t = trainer(*callbacks, max_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t.fit(net, data)
    assert t.global_step == 3
    moved = flat(net)
    assert torch.isfinite(moved).all() and not (len(moved) == len(before) and torch.equal(moved, before))


@pytest.mark.parametrize(("name", "other"), [(name, other) for name, others in OTHERS.items() for other in others])
def test_a_module_that_does_not_suit_is_refused_with_the_recipes_that_do(name: str, other: str) -> None:
    net, data = make(other)
    with pytest.raises(ValueError, match=f"recipe\\(name='{name}'\\): .* does not suit it, because .*") as error:
        eff.recipe(name, net, data=data)
    fitting = str(error.value).rpartition("that fits: ")[2].rstrip(".").split(", ")
    assert name not in fitting
    for one in fitting:
        eff.recipe(one, net, data=data)


def test_exact_and_low_memory_and_finetune_say_what_they_lack() -> None:
    """They are for any module, of which two have nothing that they could act on."""

    class Nothing(TinyClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.Sequential(nn.Bilinear(8, 8, 8)), nn.Sequential()

    with pytest.raises(
        ValueError, match="recipe\\(name='finetune'\\): Nothing does not suit it, because it has no linear"
    ):
        eff.recipe("finetune", Nothing())
    with pytest.raises(
        ValueError, match="'low-memory', variant='safe'\\): nothing of it is left for Nothing: Remat"
    ) as told:
        eff.recipe("low-memory", Nothing())
    assert "there are no repeated blocks to recompute" in str(told.value) and "low-memory:fast" in str(told.value)
    with pytest.raises(ValueError, match="'finetune', variant='safe'\\): nothing of it is left for TinyResNet: LoRA"):
        eff.recipe("finetune", TinyResNet(), own=[eff.LoRA(2), eff.QuantizedBase(8)])


@pytest.mark.parametrize("name", ["tiny_gpt", "cnn", "vit"])
def test_exact_safe_changes_no_bit(name: str) -> None:
    trained = []
    for with_recipe in (False, True):
        net, data = make(name)
        callbacks = eff.recipe("exact", net) if with_recipe else []
        losses = Losses()
        trainer(*callbacks, losses, max_steps=6).fit(net, data)
        trained.append((torch.tensor(losses.seen), flat(net)))
    (plain_losses, plain), (losses, weights) = trained
    assert torch.equal(plain_losses, losses) and torch.equal(plain, weights)


@pytest.mark.parametrize("name", ["large", "cnn"])
def test_exact_fast_changes_numbers_by_rounding_alone(name: str) -> None:
    """Under SGD: Adam divides a gradient that is zero but for rounding by itself."""
    trained = []
    for with_recipe in (False, True):
        net, data = make(name)
        net.__class__ = type("OfSGD", (type(net),), {"configure_optimizers": _sgd})
        callbacks = eff.recipe("exact", net, "fast", data=data) if with_recipe else []
        losses = Losses()
        trainer(*callbacks, losses, max_steps=3).fit(net, data)
        trained.append((torch.tensor(losses.seen), flat(net)))
        expected = {"large": "FusedLinearCrossEntropy", "cnn": "ChannelsLast"}[name]
        assert not with_recipe or expected in names(callbacks)
    (plain_losses, plain), (losses, weights) = trained
    torch.testing.assert_close(losses, plain_losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-6)


class Losses(pl.Callback):
    """The training losses of a run."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


def test_low_memory_safe_has_the_gradients_of_plain_training() -> None:
    trained = []
    for with_recipe in (False, True):
        net, data = make("tiny_gpt")
        callbacks = eff.recipe("low-memory", net) if with_recipe else []
        trainer(*callbacks, max_steps=4).fit(net, data)
        trained.append(flat(net))
    assert torch.equal(*trained)


# -- what it looks at


def test_the_module_and_random_numbers_stay_as_they_are() -> None:
    net, data = make("tiny_gpt")
    net.train()
    before, attributes = copy.deepcopy(net.state_dict()), {*vars(net)}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    eff.recipe("gpt", net, "fast", data=data)
    assert torch.equal(torch.rand(3), expected)
    assert {*vars(net)} == attributes and net._trainer is None
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def test_settings_follow_blocks_budget_and_optimizer() -> None:
    def settings(resolved: Resolved, technique: str) -> dict[str, Any]:
        return {pick.technique: dict(pick.settings) for pick, _ in resolved.picks}[technique]

    for blocks in (4, 7):
        found = resolve("gpt:fast", TinyGPT(num_layers=blocks), data=loader("tiny_gpt"))
        assert settings(found, "ProgressiveStacking") == {"stages": [[0.0, blocks // 2], [0.3, blocks]]}
    short = resolve("gpt:fast", TinyGPT(), data=loader("tiny_gpt"), steps=50)
    assert "too short (50 steps)" in left_out(short)["ProgressiveStacking"]
    few = resolve("gpt:fast", TinyGPT(num_layers=3), data=loader("tiny_gpt"))
    assert "too few" in left_out(few)["ProgressiveStacking"]
    momenta = [
        settings(resolve("gpt", TinyGPT(), data=loader("tiny_gpt"), **length), "ReplaceOptimizer")["optimizer"][
            "init_args"
        ]["momentum"]
        for length in ({"steps": 500}, {"steps": 50_000}, {"seconds": 60.0}, {"seconds": 7200.0}, {})
    ]
    assert momenta == [0.9, 0.95, 0.9, 0.95, 0.95]
    vit = resolve("vit", module("vit"), data=loader("vit"))
    assert settings(vit, "ReplaceOptimizer")["optimizer"]["init_args"]["lr"] == 1e-3, "the module's own"
    net = module("vit")
    net.__class__ = type("OfSGD", (type(net),), {"configure_optimizers": _sgd})
    other = resolve("vit", net, data=loader("vit"))
    assert settings(other, "ReplaceOptimizer")["optimizer"]["init_args"]["lr"] == 3e-3, (
        "SOAP's, since SGD's means another"
    )


@pytest.mark.parametrize(("name", "taken"), [("tiny_gpt", False), ("large", True)])
def test_the_vocabulary_decides_on_the_fused_head(name: str, taken: bool) -> None:
    net, data = make(name)
    assert ("FusedLinearCrossEntropy" in names(eff.recipe("gpt", net, data=data))) == taken
    found = resolve("gpt", net, data=data)
    assert found.profile.vocabulary == (20_000 if taken else 61)


def test_the_vocabulary_is_not_the_table_of_positions() -> None:
    """Whichever comes first, and is larger."""
    net, data = make("tiny_gpt")
    net.position = nn.Embedding(512, 16)
    net._modules["embed"] = net._modules.pop("embed")
    assert next(name for name, m in net.named_children() if isinstance(m, nn.Embedding)) == "position"
    assert resolve("gpt", net, data=data).profile.vocabulary == 61


def test_a_batch_decides_on_lengths_and_masks() -> None:
    from tests.recipes.modules import masked

    net, _ = make("masked")
    found = resolve("masked-lm:fast", net, data=masked(64))
    taken = {pick.technique: dict(pick.settings) for pick, _ in found.picks}
    assert taken["SequenceLengthWarmup"] == {"start": 16, "until": 0.3}
    assert taken["MaskRateSchedule"] == {"start": 0.3, "end": 0.15}
    assert found.profile.masked == pytest.approx(0.2, abs=0.05)
    without = resolve("masked-lm:fast", net)
    assert "no batch was looked at" in left_out(without)["SequenceLengthWarmup"]
    assert any("Pass data= to recipe()" in what for what in without.profile.unknown)


def test_techniques_are_tried_on_copies() -> None:
    """Also those that change the module for good, one after the other."""
    net, _ = make("gpt2")
    tried = trial.Trial(net, None, 10)
    assert [tried.refusal([eff.LoRA(rank)]) for rank in (2, 4)] == [None, None]
    assert tried.module is not net
    assert not any("lora" in name for one in (net, tried.module) for name, _ in one.named_parameters())


def test_several_processes_do_not_prepare_data_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would choose alike only if all of them could."""
    from tests.recipes.modules import masked

    net, _ = make("masked")
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    found = resolve("masked-lm:fast", net, data=masked(64), trainer=trainer(max_steps=3))
    assert not found.profile.data and "all processes would prepare them at once" in found.told()
    batch = next(iter(masked(64)))
    assert resolve("masked-lm:fast", net, data=batch, trainer=trainer(max_steps=3)).profile.data


def test_a_refused_technique_is_left_out_with_its_own_reason() -> None:
    net, data = make("tiny_gpt")
    found = resolve("low-memory:fast", net, data=data)  # its largest tensor has 1,024 elements
    assert "hold no tensor as large outside its embeddings" in left_out(found)["EightBitOptimizer"]
    assert names(found.callbacks()) == ["Rematerialization", "UsedRecipe"]

    class Manual(TinyGPT):
        automatic_optimization = False

    with pytest.raises(ValueError, match=r"nothing of it is left for Manual: .*automatic_optimization=False"):
        eff.recipe("gpt", Manual(), data=data)


def test_without_a_package_the_technique_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    net, data = make("gpt2")
    found = resolve("finetune", net, data=data)
    assert names(found.callbacks()) == ["LoRA", "UsedRecipe"]
    assert "bitsandbytes" in left_out(found)["QuantizedBase"]


def test_own_callbacks_come_first() -> None:
    net, data = make("tiny_gpt")
    mine = eff.ReplaceOptimizer("lion", lr=1e-3)
    found = resolve("gpt:fast", net, data=data, own=[mine])
    assert names(found.callbacks()) == ["ProgressiveStacking", "UsedRecipe"]
    assert left_out(found)["ReplaceOptimizer"] == "you have one of your own, which stays as it is"
    found = resolve("gpt:fast", net, data=data, own=[eff.ShallowToDeep()])
    assert "ShallowToDeep and ProgressiveStacking cannot train together" in left_out(found)["ProgressiveStacking"]


def test_a_module_that_cannot_be_set_up_is_looked_at_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(TinyGPT):
        def setup(self, stage: str) -> None:
            raise KeyError("only on the cluster")

    found = resolve("gpt", Stubborn(), data=loader("tiny_gpt"))
    assert names(found.callbacks()) == ["ReplaceOptimizer", "UsedRecipe"]
    assert "only on the cluster" in found.profile.unknown[0] and found.profile.rates is None
    assert "did not check: the module's optimizer" in found.told()
    monkeypatch.setattr(trial, "LARGEST", 1000)
    found = resolve("gpt", TinyGPT(), data=loader("tiny_gpt"))
    assert "at most" in found.profile.unknown[0] and found.profile.run.num_blocks == 4


@pytest.mark.parametrize("built", ["setup", "configure_model"])
def test_blocks_that_a_run_makes_are_seen(built: str) -> None:
    net = TinyGPT(built=built)
    assert resolve("gpt", net, data=loader("tiny_gpt")).profile.run.num_blocks == 4
    assert net.blocks is None


def test_it_says_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    net, data = make("tiny_gpt")
    with caplog.at_level("INFO"):
        eff.recipe("gpt:fast", net, data=data, max_steps=1000)
    text = caplog.text
    assert "recipe gpt:fast (version 1) for TinyGPT: 15,616 parameters, 4 blocks (blocks), a vocabulary of 61" in text
    assert (
        'takes ReplaceOptimizer("muon", lr=' in text
        and "takes ProgressiveStacking(stages=[[0.0, 2], [0.3, 4]])" in text
    )
    assert "leaves out FusedLinearCrossEntropy: the module has a vocabulary of 61" in text


# -- names and versions


@pytest.mark.parametrize(
    ("name", "variant", "match"),
    [
        ("gtp", None, "there is no such recipe. Did you mean 'gpt'\\? Use one of gpt, masked-lm"),
        ("gpt", "fats", "variant='fats'\\): there is no such variant. Did you mean 'fast'\\? Use one of safe, fast"),
        ("gpt:fast", "safe", "these are two variants"),
        ("gpt@99", None, "this release has version 1 of gpt"),
    ],
)
def test_names_that_are_not_there(name: str, variant: str | None, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        eff.recipe(name, TinyGPT(), variant)


def test_a_class_is_no_module() -> None:
    with pytest.raises(TypeError, match="got the class TinyGPT; expected a LightningModule"):
        eff.recipe("gpt", TinyGPT)  # pyright: ignore[reportArgumentType]


def test_a_checkpoint_holds_the_version_and_another_one_is_warned_of(tmp_path: Path) -> None:
    net, data = make("tiny_gpt")
    t = trainer(*eff.recipe("gpt@1", net, data=data), max_steps=2)
    t.fit(net, data)
    path = tmp_path / "a.ckpt"
    t.save_checkpoint(path)
    held = torch.load(path, weights_only=True)["callbacks"]
    (state,) = (value for key, value in held.items() if key.startswith("UsedRecipe"))
    assert state == {"name": "gpt", "version": 1, "variant": "safe"}
    net, data = make("tiny_gpt")
    callbacks = [*eff.recipe("gpt", net, data=data)[:-1], UsedRecipe("gpt", 2, "safe")]
    with pytest.warns(
        UserWarning, match=re.escape("made with gpt:safe (version 1), and this run uses gpt:safe (version 2)")
    ):
        trainer(*callbacks, max_steps=3).fit(net, data, ckpt_path=path)


def test_a_module_of_pytorch_lightning() -> None:
    from tests.pl import models as other

    net, data = other.TinyGPT(), other.loader("tiny_gpt")
    callbacks = eff.recipe("gpt", net, "fast", data=data)
    assert names(callbacks) == ["ReplaceOptimizer", "ProgressiveStacking", "UsedRecipe"]
    t = other.trainer(*callbacks, max_steps=3)
    t.fit(net, data)
    assert t.global_step == 3


@pytest.mark.parametrize("name", RECIPES)
def test_the_variants_differ(name: str) -> None:
    """Each on its own example: the fast one has more, or other settings."""
    recipe = RECIPES[name]
    safe, fast = ([*recipe.choose(recipe.example, variant)] for variant in ("safe", "fast"))
    assert [*recipe.variants] == ["safe", "fast"] and safe != fast
    assert recipe.fits(recipe.example) is None


def test_data_may_be_a_batch_a_loader_or_a_data_module() -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return images()

    found = [resolve("cnn", TinyResNet(), data=data) for data in (images(), next(iter(images())), Data())]
    assert [one.profile.run.image_side for one in found] == [32, 32, 32]


#: What each version chooses, as a digest. A recipe that chooses something else has another version.
CHOICES = {
    "gpt": (1, "c73c4ae01677"),
    "masked-lm": (1, "783621d4e32d"),
    "vit": (1, "0945890dbb3a"),
    "cnn": (1, "eb8d65b7b862"),
    "finetune": (1, "cc605626e4ac"),
    "low-memory": (1, "fae1f4b75c59"),
    "exact": (1, "9886bdba5a3c"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_another_choice_needs_another_version(name: str) -> None:
    recipe = RECIPES[name]
    lengths = (None, 50, 1000, 100_000)
    profiles = [replace(recipe.example, steps=steps) for steps in lengths]
    profiles += [
        replace(recipe.example, run=RunProfile(num_matrices=8), data=False),
        replace(recipe.example, vocabulary=500),
    ]
    choices = [
        (variant, choice.technique, getattr(choice, "settings", None))
        for profile in profiles
        for variant in recipe.variants
        for choice in recipe.choose(profile, variant)
    ]
    digest = hashlib.sha256(repr(choices).encode()).hexdigest()[:12]
    assert CHOICES[name] == (recipe.version, digest), f"raise the version of {name}, and write down {digest!r}"
