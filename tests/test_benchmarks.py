"""The reference tasks: every recipe trains, masks have BERT's statistics, validation is fixed, the tuning resumes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

import lightning_eff
from benchmarks import evidence, evidence_page, evidence_settings, evidence_tasks, tune
from benchmarks.bert.data import MASK, MaskedStdlibText, mask_bytes
from benchmarks.bert.module import IGNORED, ByteBert
from benchmarks.bert8k import pieces
from benchmarks.bert8k.data import MaskedPieces
from benchmarks.bert8k.module import PieceBert
from benchmarks.evidence_arms import PAPERS, SAME, SETTINGS, settings
from benchmarks.gpt2.module import ByteGPT2
from benchmarks.memory import page as memory_page
from benchmarks.rings import hardest
from benchmarks.rings.data import DIRECTIONS, Rings, render
from docs.making import facts
from examples.gpt.data import SPLIT_PERIOD, VAL_FILE, read_bytes, stdlib_files
from examples.gpt.module import GPT
from examples.vit.data import Digits, shift
from lightning_eff._catalogue.facts import facts as read_facts
from lightning_eff._core._images.images import resize
from lightning_eff._core.technique import Technique
from lightning_eff._exports.techniques import technique_classes
from lightning_eff.bench.reports.statistics import summarize
from tests.bench import synthetic
from tests.selection import share_of

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
TASKS = ("gpt", "vit", "bert", "gpt2")
SEQUENCES = ("gpt", "bert", "gpt2")
RECIPES = {
    "stacking": "ProgressiveStacking",
    "layer_dropping": "ProgressiveLayerDropping",
    "averaging": "LatestWeightAveraging",
    "importance_sampling": "ImportanceSampling",
    "selective_backprop": "SelectiveBackprop",
    "sharpness": "SharpnessAwareMinimization",
    "length_warmup": "SequenceLengthWarmup",
    "muon": "ReplaceOptimizer",
    "soap": "ReplaceOptimizer",
    "schedule_free": "ScheduleFree",
    "moving_average": "ExponentialMovingAverage",
    "batch_warmup": "BatchSizeWarmup",
    "rate_schedule": "LearningRateSchedule",
    "rematerialization": "Rematerialization",
    "activation_compression": "ActivationCompression",
    "activation_offload": "ActivationOffload",
    "optimizer_offload": "OptimizerOffload",
    "fused_head": "FusedLinearCrossEntropy",
    "mask_rate": "MaskRateSchedule",
    "random_ltd": "RandomLTD",
    "patch_dropout": "PatchDropout",
    "token_dropping": "TokenDropping",
    "token_merging": "TokenMerging",
    "ngram": "NgramEmbedding",
    "ngram_dense": "NgramEmbedding",
    "compile": "RegionalCompilation",
    "progressive_resizing": "ProgressiveResizing",
    "efficient_train": "EfficientTrain",
    "fix_res": "FixRes",
    "zero_projections": "ZeroProjections",
    "compound_growth": "CompoundGrowth",
    "auto_prog": "AutoProg",
    "data_driven_init": "DataDrivenInit",
    "update_periods": "UpdatePeriods",
    "upcycling": "SparseUpcycling",
}
COMPUTE = {"ngram", "ngram_dense", "compile"}
HEADS = {"fused_head", "mask_rate"}  # of masked language models
RESOLUTIONS = {"progressive_resizing", "efficient_train", "fix_res"}
OTHERS = {"update_periods", "upcycling"}  # of one task each
WEIGHTS = {"muon", "soap", "schedule_free", "moving_average", "batch_warmup", "rate_schedule"}
MEMORY = {"rematerialization", "activation_compression", "activation_offload", "optimizer_offload"}
TOKENS = {
    "random_ltd",
    "patch_dropout",
    "token_dropping",
    "token_merging",
}  # no comparison of theirs is on the page yet
ONLY = {
    "mask_rate": ("bert",),
    "compound_growth": ("gpt", "bert"),
    "auto_prog": ("gpt", "vit"),
    "length_warmup": SEQUENCES,
    "fused_head": SEQUENCES,
    "data_driven_init": ("gpt", "vit", "bert"),
    "patch_dropout": ("vit",),
    "token_merging": ("vit",),
    "token_dropping": ("bert", "gpt2"),  # the GPT holds its rotary tables itself, and samples differ
    **dict.fromkeys(COMPUTE, ("gpt",)),
    **dict.fromkeys(OTHERS, ()),
    **dict.fromkeys(RESOLUTIONS, ()),  # the rings alone, which have few recipes
}
PAIRS = [(task, recipe) for task in TASKS for recipe in RECIPES if task in ONLY.get(recipe, TASKS)]
PAIRS += [("rings", recipe) for recipe in (*sorted(RESOLUTIONS), "patch_dropout", "random_ltd", "muon", "soap")]
PAIRS += [("bert8k", recipe) for recipe in (*sorted(HEADS), "zero_projections", "data_driven_init", "update_periods")]
PAIRS += [("gpt256", recipe) for recipe in ("compile", "muon", "stacking")]
PAIRS += [("gpt2", "compiled"), ("trained", "upcycling")]

# Widths and texts as small as they go; depths and lengths stay those of the task, because recipes are fitted to them.
TINY: dict[str, list[str]] = {
    "gpt": ["--model.dim=16", "--model.num_heads=2", "--data.max_bytes=2000000", "--data.num_eval_windows=2"],
    "gpt256": ["--model.dim=16", "--model.num_heads=2", "--data.max_bytes=2000000", "--data.num_eval_windows=2"],
    "trained": ["--model.dim=16", "--model.num_heads=2", "--data.max_bytes=2000000", "--data.num_eval_windows=2"],
    "vit": ["--model.dim=16", "--model.num_heads=2", "--data.batch_size=8", "--trainer.limit_train_batches=2"],
    "rings": [
        *("--model.dim=16", "--model.num_heads=2", "--data.batch_size=8", "--trainer.limit_train_batches=2"),
        *("--data.num_train_images=16", "--data.num_val_images=8"),
    ],
    "bert": ["--model.dim=16", "--model.num_heads=2", "--data.max_bytes=2000000", "--data.num_eval_windows=2"],
    "bert8k": [
        *("--model.dim=16", "--model.num_heads=2", "--data.num_pieces=300", "--data.max_bytes=300000"),
        *("--data.num_eval_windows=2", "--data.batch_size=2"),
    ],
    "gpt2": [
        *("--model.n_embd=16", "--model.n_head=2", "--model.vocab_size=256", "--data.max_bytes=2000000"),
        *("--data.batch_size=3", "--data.num_eval_windows=2", "--trainer.accelerator=cpu"),
    ],
}
SHORT = [
    *(
        "--seed_everything=0",
        "--trainer.max_steps=2",
        "--trainer.limit_val_batches=1",
        "--trainer.val_check_interval=2",
    ),
    *("--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"),
    *("--trainer.enable_model_summary=false", "--trainer.num_sanity_val_steps=0"),
]


def parsed(task: str, recipe: str | None, tmp_path: Path) -> LightningCLI:
    """What ``lightning-eff fit --config baseline.yaml --config recipes/recipe.yaml`` would run, made tiny."""
    overlays = [] if recipe is None else ["--config", str(BENCHMARKS / task / "recipes" / f"{recipe}.yaml")]
    own = [f"--data.folder={tmp_path}"] if task == "bert8k" else []
    if task == "trained":
        dense = tmp_path / "dense.ckpt"
        torch.save({"state_dict": GPT(16, 4, 2, 128).state_dict()}, dense)
        own = [f"--model.dense={dense}"]
    cli = LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        run=False,
        args=[
            *("--config", str(BENCHMARKS / task / "baseline.yaml"), *overlays, *TINY[task], *own, *SHORT),
            f"--trainer.default_root_dir={tmp_path}",
        ],
    )
    averages = lightning_eff.LatestWeightAveraging, lightning_eff.RegularizedNonlinearAcceleration
    for callback in cli.trainer.callbacks:
        if isinstance(callback, averages) and callback.interval != "epoch":
            callback.interval = 1  # two steps are shorter than the recipe's interval
    return cli


def test_every_task_has_every_recipe_that_applies() -> None:
    recipes = [(path.parent.parent, path.stem) for path in BENCHMARKS.glob("*/recipes/*.yaml")]
    found = {
        (task.name, name) for task, name in recipes if (task / "baseline.yaml").is_file()
    }  # others are small studies
    assert found == set(PAIRS)
    assert all(issubclass(getattr(lightning_eff, name), Technique) for name in RECIPES.values())


def _chosen(task: str, recipe: str | None) -> Any:
    """A third of the recipes of one task is tried each time, one of each other task's, and all when asked for."""
    some = recipe in (None, "stacking", "patch_dropout", "progressive_resizing")
    some = some or (task == "gpt" and share_of(3, str(recipe)) == 0)
    slow = (task, recipe) == ("rings", "patch_dropout") or not some
    return pytest.param(task, recipe, marks=pytest.mark.slow) if slow else (task, recipe)


@pytest.mark.parametrize(
    ("task", "recipe"), [_chosen(task, recipe) for task, recipe in (*((task, None) for task in TASKS), *PAIRS)]
)
def test_trains(task: str, recipe: str | None, tmp_path: Path) -> None:
    cli = parsed(task, recipe, tmp_path)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.global_step == 2
    assert math.isfinite(cli.trainer.callback_metrics["val_loss"].item())
    techniques = [type(callback).__name__ for callback in cli.trainer.callbacks if isinstance(callback, Technique)]
    assert techniques == ([] if recipe is None else [RECIPES[recipe]])


@pytest.mark.parametrize(("task", "recipe"), PAIRS)
def test_a_recipe_changes_the_callbacks_alone(task: str, recipe: str) -> None:
    path = BENCHMARKS / task / "recipes" / f"{recipe}.yaml"
    config = yaml.safe_load(path.read_text())
    assert config.keys() == {"trainer"} and config["trainer"].keys() == {"callbacks"}
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("recipe", ["muon", "soap"])
@pytest.mark.parametrize("task", (*TASKS, "rings"))
def test_the_baseline_is_the_control_of_equal_rates(task: str, recipe: str) -> None:
    """What a matrix optimizer leaves to AdamW keeps the baseline's rate, so that no gain of theirs is counted as its own."""
    recipe = yaml.safe_load((BENCHMARKS / task / "recipes" / f"{recipe}.yaml").read_text())
    baseline = yaml.safe_load((BENCHMARKS / task / "baseline.yaml").read_text())
    (callback,) = recipe["trainer"]["callbacks"]
    assert set(callback["init_args"]["group_lr"].values()) == {baseline["model"]["init_args"]["lr"]}


@pytest.mark.parametrize("task", TASKS)
def test_stacking_ends_at_the_full_depth(task: str, tmp_path: Path) -> None:
    cli = parsed(task, "stacking", tmp_path)
    depth = cli.model.hparams["n_layer" if task == "gpt2" else "num_layers"]
    (stacking,) = (c for c in cli.trainer.callbacks if isinstance(c, lightning_eff.ProgressiveStacking))
    assert depth >= 4 and depth % 2 == 0
    assert stacking.stages[-1][1] == depth and stacking.stages[-1][0] == 0.3


def test_masking_has_berts_statistics() -> None:
    text = torch.randint(0, 256, (1000, 1000))
    batch = mask_bytes(text)
    ids, labels = batch["input_ids"], batch["labels"]
    chosen = labels != IGNORED
    total = int(chosen.sum())
    assert torch.equal(labels[chosen], text[chosen]) and torch.equal(ids[~chosen], text[~chosen])
    # Six standard deviations of a share of n draws.
    near = [(chosen.float().mean(), 0.15, 1_000_000)]
    hidden, same = ids[chosen] == MASK, ids[chosen] == text[chosen]
    near += [(hidden.float().mean(), 0.8, total), (same.float().mean(), 0.1 + 0.1 / 256, total)]
    for share, expected, n in near:
        assert abs(float(share) - expected) < 6 * math.sqrt(expected * (1 - expected) / n), (share, expected)
    others = ids[chosen][~hidden & ~same]
    assert int(others.min()) == 0 and int(others.max()) == 255  # any byte, never the mask
    everything = mask_bytes(text[:2], probability=1.0)["labels"]
    assert torch.equal(everything, text[:2])


def test_training_masks_are_drawn_from_the_global_generator_and_validations_are_fixed() -> None:
    def loaders(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(seed)
        data = MaskedStdlibText(block_size=32, batch_size=4, max_bytes=100_000, num_eval_windows=6)
        data.setup("fit")
        before = torch.get_rng_state()
        val = next(iter(data.val_dataloader()))
        torch.set_rng_state(before)
        return next(iter(data.train_dataloader())), val, data._mask([data.text.train_set[0]])["labels"]

    (train, val, drawn), (again, val_again, _), (other, val_other, drawn_other) = loaders(1), loaders(1), loaders(2)
    assert all(torch.equal(train[name], again[name]) for name in train)
    assert not torch.equal(train["input_ids"], other["input_ids"]) and not torch.equal(drawn, drawn_other)
    for name in val:
        assert torch.equal(val[name], val_again[name]) and torch.equal(val[name], val_other[name])
    assert int((val["labels"] != IGNORED).sum()) > 0


def test_bert_loss_is_the_mean_over_the_masked_bytes() -> None:
    model = ByteBert(dim=16, num_layers=2, block_size=16).eval()
    batch = mask_bytes(torch.randint(0, 256, (3, 16)), probability=0.3)
    log_p = model(batch["input_ids"]).log_softmax(-1)
    wanted = [
        -log_p[b, t, label]
        for b, row in enumerate(batch["labels"].tolist())
        for t, label in enumerate(row)
        if label >= 0
    ]
    torch.testing.assert_close(model._loss(batch), torch.stack(wanted).mean())


def test_validation_loss_weighs_windows_by_their_masked_bytes(tmp_path: Path) -> None:
    cli = parsed("bert", None, tmp_path)
    cli.datamodule.batch_size = 1  # so that windows, with unequal numbers of masked bytes, are averaged
    cli.trainer.limit_val_batches = 1.0
    (result,) = cli.trainer.validate(cli.model, datamodule=cli.datamodule, verbose=False)
    whole = cli.datamodule.val_set.batch
    assert len({int((row != IGNORED).sum()) for row in whole["labels"]}) > 1
    assert result["val_loss"] == pytest.approx(cli.model._loss(whole).item(), rel=1e-5)


def test_pieces_are_learnt_once_and_alike_from_the_training_text_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [b"def one():\n    return one\n\xff" * 20, "gr\u00fcn = two + two\n".encode() * 20]
    tokenizer, again = pieces.learn(texts, 270), pieces.learn(texts, 270)
    assert tokenizer.to_str() == again.to_str() and tokenizer.get_vocab_size() == 270
    first, _ = pieces.pieces(texts, [b"def"], 270, tmp_path)
    assert tokenizer.decode(first.tolist()).encode() == b"".join(texts).replace(b"\xff", "\ufffd".encode())
    assert len(first) < sum(map(len, texts)) * 0.8 and int(first.max()) < 270
    with pytest.raises(ValueError, match="raise max_bytes"):
        pieces.learn(texts, 2000)
    learnt: list[Any] = []
    monkeypatch.setattr(pieces, "learn", lambda texts, num: learnt.append(texts) or tokenizer)
    kept, _ = pieces.pieces(texts, [b"def"], 270, tmp_path)
    assert torch.equal(kept, first) and not learnt
    data = MaskedPieces(num_pieces=270, block_size=8, max_bytes=1_500_000, num_eval_windows=3, folder=tmp_path)
    data.setup("fit")
    held = read_bytes(stdlib_files(), 1_500_000)[VAL_FILE::SPLIT_PERIOD]
    assert len(learnt[0]) > 8 * len(held) and not {text for text in held if len(text) > 200} & set(learnt[0])


def test_masked_pieces_are_validated_alike_and_trained_anew(tmp_path: Path) -> None:
    kept = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        data = MaskedPieces(8, 4, num_pieces=260, max_bytes=200_000, num_eval_windows=6, folder=tmp_path)
        data.setup("fit")
        kept.append((next(iter(data.val_dataloader())), data._mask(list(data.train_set[:6]))))
    (val, train), (val_again, train_again) = kept
    assert all(torch.equal(val[name], val_again[name]) for name in val)
    assert not torch.equal(train["labels"], train_again["labels"]) and train["input_ids"].shape == (6, 8)
    masked = torch.cat([batch["input_ids"][batch["labels"] != IGNORED] for batch in (val, train, train_again)])
    assert int(masked.max()) == 260 and masked.eq(260).float().mean() > 0.5
    with pytest.raises(ValueError, match="num_pieces=255"):
        MaskedPieces(num_pieces=255)


def test_sparse_prediction_and_evaluation_have_the_plain_loss() -> None:
    torch.manual_seed(0)
    model = PieceBert(dim=16, num_layers=2, block_size=16, vocab_size=301)
    batch = mask_bytes(torch.randint(0, 300, (3, 16)), probability=0.3, mask=300)
    plain = model._loss(batch)
    wanted = torch.autograd.grad(plain, list(model.parameters()))
    model.sparse = True
    loss = model._loss(batch)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), wanted)
    torch.testing.assert_close(model.eval()._loss(batch), plain)


def test_gpt2_has_124_million_parameters() -> None:
    with torch.device("meta"):
        model = ByteGPT2()
    # GPT-2's 124,439,808 with 47 more rows of the tied embedding.
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 + (50304 - 50257) * 768


def test_shifted_digits() -> None:
    images = torch.rand(4000, 1, 8, 8)
    moved = shift(images, 1)
    counts: dict[tuple[int, int], int] = {}
    framed = torch.nn.functional.pad(images, [1] * 4, value=-1.0)
    for before, after in zip(framed, moved, strict=True):
        places = [(i, j) for i in range(3) for j in range(3) if torch.equal(before[:, i : i + 8, j : j + 8], after)]
        assert len(places) == 1
        counts[places[0]] = counts.get(places[0], 0) + 1
    spread = 6 * math.sqrt(4000 * (1 / 9) * (8 / 9))
    assert len(counts) == 9 and all(abs(n - 4000 / 9) < spread for n in counts.values()), counts


def test_digits_by_default_are_as_they_were() -> None:
    plain, shared = Digits(), Digits(max_shift=1, num_val_images=450)
    plain.setup("fit")
    shared.setup("fit")
    assert [len(s) for s in (plain.train_set, plain.val_set, plain.test_set)] == [1297, 250, 250]
    assert [len(s) for s in (shared.train_set, shared.val_set, shared.test_set)] == [1297, 450, 50]
    assert torch.equal(plain.train_set.tensors[0], shared.train_set.tensors[0])
    torch.manual_seed(3)
    images, _ = next(iter(plain.train_dataloader()))
    known = {tuple(image.flatten().tolist()) for image in plain.train_set.tensors[0]}
    assert all(tuple(image.flatten().tolist()) in known for image in images)
    with pytest.raises(ValueError, match="max_shift=8"):
        Digits(max_shift=8)
    with pytest.raises(ValueError, match="noise=-1"):
        Digits(noise=-1)
    with pytest.raises(ValueError, match="num_noises=2, noise=0"):
        Digits(num_noises=2)


def test_noisy_digits() -> None:
    """Held-out images have the same noise in every run, training images other noise each time, of the deviation given."""
    plain, noisy = Digits(num_val_images=450), Digits(num_val_images=450, noise=0.5, num_noises=3)
    kept = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        plain.setup("fit")
        noisy.setup("fit")
        kept.append(noisy.val_set.tensors)
    images, labels = kept[0]
    assert images.shape == (1350, 1, 8, 8) and torch.equal(images, kept[1][0])
    assert torch.equal(labels, plain.val_set.tensors[1].repeat(3))
    noise = images - plain.val_set.tensors[0].repeat(3, 1, 1, 1)
    assert noise.std().item() == pytest.approx(0.5, rel=0.02) and abs(noise.mean().item()) < 0.01
    assert not torch.equal(noise[:450], noise[450:900])
    torch.testing.assert_close(noisy.train_set.tensors[0], plain.train_set.tensors[0], rtol=0, atol=0)
    clean = {tuple(image.flatten().tolist()) for image in plain.train_set.tensors[0]}
    first, second = (next(iter(noisy.train_dataloader()))[0] for _ in range(2))
    assert not torch.equal(first, second) and not any(tuple(image.flatten().tolist()) in clean for image in first)
    with pytest.raises(ValueError, match="num_val_images=500"):
        Digits(num_val_images=500)


def test_a_ring_has_one_hatched_mark_that_half_of_the_side_does_not_show() -> None:
    """Marks are alike but for stripes, of which three quarters of the side hold most and half of it nearly nothing."""
    directions = torch.tensor([[d, (d + 2) % DIRECTIONS, (d + 5) % DIRECTIONS] for d in range(DIRECTIONS)])
    centre, radius = torch.full((DIRECTIONS, 2), 31.5), torch.full((DIRECTIONS,), 21.0)
    rings, others = render(directions, centre, radius), render(directions.roll(1, dims=1), centre, radius)
    for ring, (hatched, *grey) in zip(rings[:, 0], directions.tolist(), strict=True):
        for d in range(DIRECTIONS):
            down, across = (31.5 + 21 * f(2 * math.pi * d / DIRECTIONS) for f in (math.sin, math.cos))
            mark = ring[round(down), round(across) - 1 : round(across) + 2]  # a period
            wanted = 0.0 if d in (hatched, *grey) else 1.0
            assert mark.mean().item() == pytest.approx(wanted, abs=0.02), (d, hatched)
            assert (mark.std().item() > 0.5) == (d == hatched), (d, hatched)

    noise = torch.randn(rings.shape, generator=torch.Generator().manual_seed(0))

    def told(side: int) -> float:
        """How far apart images are that differ in which mark is hatched: the sum of squares, by the variance of the noise."""
        one, other, small_noise = (resize(images, (side, side)) for images in (rings, others, noise))
        return ((one - other) ** 2).sum().item() / small_noise.var().item()

    assert told(32) < 0.03 * told(64) and told(48) > 0.1 * told(64)


def test_rings_are_the_same_in_every_run_and_their_noise_in_validation_alone() -> None:
    kept = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        data = Rings(batch_size=4, num_train_images=300, num_val_images=5)
        data.setup("fit")
        kept.append((*data.val_set.tensors, *data.train_set.tensors))
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    assert set(kept[0][3].tolist()) == set(range(DIRECTIONS)) and kept[0][2].abs().max() == 1
    assert not torch.equal(kept[0][2][:44], kept[0][2][256:])
    noise = data._noisy([(image, label) for image, label in data.train_set])[0] - data.train_set.tensors[0]
    assert noise.std().item() == pytest.approx(0.5, rel=0.02)
    with pytest.raises(ValueError, match="noise=-1"):
        Rings(noise=-1)
    with pytest.raises(ValueError, match="num_val_images=0"):
        Rings(num_val_images=0)


@pytest.mark.parametrize("task", tune.TASKS)
def test_the_baseline_is_the_best_point_of_its_grid(task: str) -> None:
    results = json.loads((BENCHMARKS / "results" / f"tuning_{task}.json").read_text())
    assert results["seed"] == 0 and f"{results['budget_seconds']:g}rs" == evidence.BUDGETS.get(task, "60rs")
    best = min(results["results"], key=lambda result: result["metrics"]["val_loss"])
    baseline = yaml.safe_load((BENCHMARKS / task / "baseline.yaml").read_text())
    assert {key: baseline[key] for key in ("trainer", "model", "data")} == best["settings"]
    assert all(result["validation_seconds"] < results["budget_seconds"] / 30 for result in results["results"])


def test_a_grid_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks" / "gpt").mkdir(parents=True)
    (tmp_path / "benchmarks" / "gpt" / "baseline.yaml").write_bytes((BENCHMARKS / "gpt" / "baseline.yaml").read_bytes())
    grid_file = tmp_path / "benchmarks" / "gpt" / "grid.yaml"
    points: list[dict[str, Any]] = [{"model": {"lr": 1e-3}}, {"model": {"lr": 2e-3}}]
    grid_file.write_text(yaml.safe_dump({"points": points}))
    monkeypatch.setattr(tune, "ROOT", tmp_path)
    out = tmp_path / "out.json"
    tune.Grid("gpt", 0, 60.0, out, None).add(0, {"metrics": {"val_loss": 1.0}})
    assert tune.Grid("gpt", 0, 60.0, out, None).left() == [1]
    assert tune.Grid("gpt", 0, 30.0, out, None).left() == [0, 1]  # another budget
    assert tune.Grid("gpt", 5, 60.0, out, None).left() == [0, 1]  # another seed
    points[0]["data"] = {"batch_size": 2}
    grid_file.write_text(yaml.safe_dump({"points": points}))
    assert tune.Grid("gpt", 0, 60.0, out, None).left() == [0, 1]  # another setting
    with pytest.raises(ValueError, match="rate"):
        tune.settings("gpt", {"rate": 1})


def test_a_point_is_trained_for_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    small = {"dim": 16, "num_layers": 2, "num_heads": 2, "block_size": 16}
    data = {"block_size": 16, "batch_size": 2, "max_bytes": 100_000, "num_eval_windows": 2}
    config = tune.settings("gpt", {"model": small, "data": data})
    result = tune.run_point(config, seed=0, budget=0.3)
    assert result["steps"] == int(0.3 / result["step_seconds"])
    assert math.isfinite(result["metrics"]["val_loss"]) and math.isfinite(result["train_loss"])


def test_the_page_of_evidence_is_what_the_results_say() -> None:
    found, tried, planted, weights, compute, shares = evidence.committed()
    made = evidence.pages(found, tried, planted, weights, compute, shares, evidence_page.further())
    for name, text in made.items():
        assert (ROOT / "docs" / name).read_text() == text, f"run `python benchmarks/evidence.py page`: {name}"
        assert str(ROOT) not in text
    kept = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / "evidence").glob("*.md")}
    assert made.keys() == {"evidence.md", *kept}
    for task, results in found.items():
        assert results["plan"]["budget"]["clock"] == "reference" and len(results["plan"]["seeds"]) >= 3
        assert (ROOT / "docs" / f"evidence_{task}.png").is_file()
    assert "gpt" in found
    head = made["evidence.md"].partition("\n| task |")[2].partition("\n\n")[0].splitlines()
    assert {line.split(" | ")[0].strip("| ") for line in head[2:]} == {evidence.TASKS[task] for task in shares}
    assert len(head) < 15


def test_the_page_has_a_line_for_every_technique_the_lost_ones_too() -> None:
    made = synthetic.everything()
    summary = summarize(made)
    text = evidence.pages({"gpt": {**made, "summary": summary}})["evidence/gpt.md"]
    for recipe, (technique, _) in evidence.CLAIMS.items():
        lines = [line for line in text.splitlines() if line.startswith(f"| `{technique}`")]
        assert len(lines) == (recipe in summary), technique
        assert all(f" | {evidence_tasks.verdict(summary[recipe])} | " in line for line in lines)
    assert set(RECIPES) - MEMORY - WEIGHTS - TOKENS - COMPUTE - HEADS - RESOLUTIONS - OTHERS == set(evidence.CLAIMS)
    assert set(evidence.WEIGHTS) == WEIGHTS | {"adamw_matrices"}
    assert set(evidence.COMPUTE) >= COMPUTE | HEADS | RESOLUTIONS | OTHERS
    assert "| *control: two layers throughout* |" in text


def of_arms(**finals: float) -> dict[str, Any]:
    """Results of arms whose figures are all the same but for the losses that they end with."""
    speed = {"estimate": 1.25, "low": 1.1, "high": 1.4, "n": 3}
    arms = {
        name: {"final": {"mean": final, "values": {"1": final}}, "speedup": speed, "verdict": f"as {name}"}
        for name, final in finals.items()
    }
    return {"plan": {"seeds": [0], "budget": {"seconds": 30.0}}, "summary": arms}


def test_papers_settings_and_searched_ones_stand_side_by_side() -> None:
    """The best of the search stands beside the paper's, unless that was the best."""
    found, confirmed = of_arms(stacking=1.4, averaging=1.4), of_arms(stacking_briefly=1.35, muon_paper=1.39)
    search = of_arms(stacking=1.5, stacking_briefly=1.3, stacking_until_half=1.6, averaging=1.4, averaging_short=1.45)
    rows = [*evidence_settings.rows("gpt", found, {"search_settings": search, "settings": confirmed})]
    assert [(of, settings, one["verdict"], seconds) for of, settings, one, seconds in rows] == [
        ("ProgressiveStacking", "2 of 4 blocks until 0.15 of the budget (best of 3)", "as stacking_briefly", 30.0),
        ("Muon", "the paper's settings, rate 0.02, momentum 0.95, no decay", "as muon_paper", 30.0),
    ]
    assert evidence_settings.winners(search) == ["stacking_briefly"]
    assert evidence_settings.to_confirm(search)[:2] == ["stacking_briefly", "muon_paper"]
    (papers,) = evidence_settings.rows("gpt", found, {"settings": confirmed})
    assert papers[0] == "Muon"
    assert [*evidence_settings.rows("gpt", found, {"search_settings": search})] == []


def test_what_won_among_settings_is_what_was_held_against_the_baseline() -> None:
    (_, tried, _, _, _, _) = evidence.committed()
    for task, parts in tried.items():
        if "search_settings" in parts:
            arms = {arm["name"] for arm in parts["settings"]["plan"]["arms"][1:]}
            papers = {name for of in PAPERS.values() for name in of}
            assert arms - papers == set(evidence_settings.winners(parts["search_settings"])), task


@pytest.mark.parametrize("task", ["gpt", "vit", "bert"])
def test_other_settings_are_of_the_same_technique(task: str) -> None:
    """Each differs from its recipe and is there wherever that is, but where the search had found the paper's."""
    expected = set()
    for recipe, names in {**SETTINGS, **PAPERS}.items():
        file = BENCHMARKS / task / "recipes" / f"{recipe}.yaml"
        if (task, recipe) in SAME:
            ((mine,), (its,)) = callbacks(file), callbacks(BENCHMARKS / "gpt" / "settings" / f"{recipe}_paper.yaml")
            assert mine == its
        elif file.is_file():
            expected |= set(names)
            for name in names:
                ((mine,), (its,)) = callbacks(file), callbacks(BENCHMARKS / task / "settings" / f"{name}.yaml")
                assert mine["class_path"] == its["class_path"] and mine != its, name
    assert {path.stem for path in BENCHMARKS.glob(f"{task}/settings/*.yaml")} == expected
    assert expected == set(settings()) or task != "gpt"


def callbacks(overlay: Path) -> list[dict[str, Any]]:
    return yaml.safe_load(overlay.read_text())["trainer"]["callbacks"]


def test_the_page_on_memory_names_every_technique_that_saves_it() -> None:
    text = (ROOT / "docs" / "memory.md").read_text()
    assert all(f"`{RECIPES[recipe]}" in text for recipe in MEMORY)
    assert text == memory_page.page()
    assert (ROOT / "docs" / "memory.png").is_file() and "{{" not in text and str(ROOT) not in text


def test_every_arm_of_what_moves_weights_or_costs_a_step_less_is_there() -> None:
    """As a recipe, a stack or a control: of a task, as one of them."""
    for name in (*evidence.COMPUTE, *evidence.WEIGHTS):
        tasks = [path.parent.parent.name for path in BENCHMARKS.glob(f"*/*/{name}.yaml")]
        assert tasks and len(set(tasks)) == len(tasks), name


def test_the_control_of_tables_has_as_many_parameters() -> None:
    counts = []
    for part, overlay in (("recipes", "ngram"), ("controls", "wide")):
        settings = yaml.safe_load((BENCHMARKS / "gpt" / "baseline.yaml").read_text())["model"]["init_args"]
        overlaid = yaml.safe_load((BENCHMARKS / "gpt" / part / f"{overlay}.yaml").read_text())
        net = GPT(**settings | overlaid.get("model", {}).get("init_args", {}))
        if part == "recipes":
            lightning_eff.apply(net, lightning_eff.NgramEmbedding())
        counts.append(sum(p.numel() for p in net.parameters()))
    assert counts[1] == pytest.approx(counts[0], rel=0.02)


def trained_elsewhere(path: Path) -> bool:
    """Whether it is another task's setting by the name of one of the GPT's, which is trained each time."""
    return path.parts[-3] != "gpt" and (BENCHMARKS / "gpt" / "settings" / path.name).is_file()


def test_other_settings_are_ones_that_their_techniques_take() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    for path in BENCHMARKS.glob("*/settings/*.yaml"):
        for said in yaml.safe_load(path.read_text())["trainer"]["callbacks"]:
            name = said["class_path"].removeprefix("lightning_eff.")
            made = parser.parse_object({"callback": said | {"class_path": f"lightning_eff.{name}"}})
            assert type(parser.instantiate_classes(made).callback).__name__ == name, path


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow) if "compiled" in path.stem or trained_elsewhere(path) else path
        for path in sorted((*BENCHMARKS.glob("*/stacks/*.yaml"), *BENCHMARKS.glob("*/settings/*.yaml")))
    ],
    ids=lambda path: f"{path.parent.parent.name}-{path.stem}",
)
def test_a_stack_and_other_settings_train(path: Path, tmp_path: Path) -> None:
    cli = parsed(path.parent.parent.name, f"../{path.parent.name}/{path.stem}", tmp_path)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.global_step == 2 and yaml.safe_load(path.read_text()).keys() == {"trainer"}


def arm(estimate: float, verdict: str) -> dict[str, Any]:
    return {"speedup": {"estimate": estimate}, "verdict": verdict}


@pytest.mark.parametrize(
    ("tasks", "speed"),
    [
        ([[arm(2.0, "faster")], [arm(0.5, "no difference shown")]], 1.0),  # which outweighs it
        ([[arm(2.0, "faster")], [arm(1.28, "no difference shown")]], 1.6),
        ([[arm(2.0, "faster"), arm(0.1, "slower")], [arm(1.28, "faster")]], 1.6),  # of two settings, the better
        ([[arm(2.0, "faster")], [arm(0.9, "slower")]], 1.0),  # one speaks for it and one against it
        ([[arm(0.5, "slower")], [arm(0.98, "no difference shown")]], 0.7),
        ([[arm(0.5, "slower")]], 0.5),
        ([[arm(1.3, "no difference shown")]], 1.0),
    ],
)
def test_a_speed_is_the_mean_over_tasks_that_agree(tasks: list[list[dict[str, Any]]], speed: float) -> None:
    assert facts.agreed(tasks) == pytest.approx(speed)


def test_what_a_search_begins_with_is_what_was_measured() -> None:
    """Found anew from the files of results, without what writes the package's facts."""
    shown: dict[str, dict[str, list[tuple[float, str]]]] = {}
    found, _, _, weights, compute, _ = evidence.committed()
    for names, every in ((evidence.CLAIMS, found), (evidence.WEIGHTS, weights), (evidence.COMPUTE, compute)):
        for task, results in every.items():
            for recipe in names.keys() & RECIPES.keys() & results["summary"].keys():
                one = results["summary"][recipe]
                told = one["speedup"]["estimate"], one["verdict"]
                shown.setdefault(RECIPES[recipe], {}).setdefault(task, []).append(told)
    single = {"SharpnessAwareMinimization", "ScheduleFree", "NgramEmbedding", "MaskRateSchedule", "ProgressiveStacking"}
    speeds = read_facts()["speed"]
    for name in single:
        best = [max(of_task) for of_task in shown[name].values()]
        mean = math.prod(speed for speed, _ in best) ** (1 / len(best))
        assert speeds[name] == pytest.approx(mean, abs=0.006), name
    assert speeds["ReplaceOptimizer"] > 1 > speeds["Reformer"]
    assert "BatchSizeWarmup" not in speeds, "no more than its baseline"
    assert speeds == facts.speeds() and speeds.keys() <= {cls.__name__ for cls in technique_classes()}


def test_what_the_hardest_rings_weigh() -> None:
    found = hardest.weighed(torch.tensor([0.0, 0.1, 3.0, 0.1, 0.6, 0.1, 0.1]))
    assert found["mean"] == pytest.approx(4.0 / 7) and found["largest"][:2] == pytest.approx([3.0, 0.6])
    assert found["share_of_one"] == pytest.approx(0.75) and found["share_of_five"] == pytest.approx(3.9 / 4.0)
    assert found["mean_without_one"] == pytest.approx(1.0 / 6) and found["wrong"] == 1 and found["images"] == 7


def test_the_hardest_rings_are_looked_for_after_a_run() -> None:
    threads = torch.get_num_threads()
    try:
        (run,) = hardest.main(["--seeds", "4", "--steps", "1"])["runs"]
    finally:
        torch.set_num_threads(threads)
    assert run["validation"]["images"] == 512 and run["training"]["images"] == 8192
    assert abs(run["validation"]["mean"] - math.log(DIRECTIONS)) < 0.3, "a guess, after one step"
