"""What the processes run that resume under the hybrid strategy, and the single process that goes on in their place."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_eff import ExactResume
from lightning_eff.strategies._hybrid.shards import local
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
from tests.cases import case_of
from tests.models import Samples, module, trainer
from tests.runs import Interrupt, SaveBatches, differences
from tests.strategies.hybrid_jobs import Recorder, Settings, averaged, everywhere
from tests.strategies.technique_jobs import shard_itself

NAN = 123456.0
BATCHES = 13  # five steps of three batches, two to close an epoch of four batches and a small one


def strategy_of(settings: Settings | str) -> Any:
    """A string of Lightning's, or a new strategy with blocks divided one by one, small as they are.

    With "itself" it is Lightning's own, of a module that divides itself.
    """
    if "itself" in settings:
        sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
        return ModelParallelStrategy(**{**sizes, **settings["itself"]})  # type: ignore[index]
    return settings if isinstance(settings, str) else HybridParallelStrategy(**{"min_num_params": 0, **settings})


def run(case: Settings, *callbacks: pl.Callback, resume: Path | None = None) -> tuple[pl.LightningModule, pl.Trainer]:
    """Fit with shuffled batches, the last of an epoch a small one, over windows, with clipping and validation.

    A resumed run starts from another seed, so that all its randomness comes from the checkpoint.

    Args:
        case: "strategy" (of :func:`strategy_of`), "replicas" (1), "module" (arguments of the module), "name" (its name),
            "technique" (one at work, by name), "saved" (after which batches the undisturbed run saves; all),
            "seeds" (each replica draws from a seed of its own, as without seed_everything), "fit" (of the Trainer).
        callbacks: of the run.
        resume: a checkpoint.
    """
    world, replicas = int(os.environ.get("WORLD_SIZE", "1")), case.get("replicas", 1)
    pl.seed_everything(1, verbose=False)
    net, name = module(case.get("name", "tiny_gpt"), **case.get("module", {})), case.get("name", "tiny_gpt")
    if "itself" in case["strategy"]:
        shard_itself(net, [])
    train = DataLoader(Samples(name, 18 * replicas), 4, shuffle=True)
    validation = DataLoader(Samples(name, 8 * replicas, 5), 4)
    pl.seed_everything(99 if resume else 1, verbose=False)  # last, as Lightning seeds anew where it starts processes
    if case.get("seeds"):
        os.environ.pop("PL_GLOBAL_SEED")  # from which Lightning seeds all ranks alike
        torch.manual_seed(99 if resume else int(os.environ["RANK"]) % replicas)
    settings: dict[str, Any] = {
        "max_steps": 5,
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.1,
        "limit_val_batches": 2,
        "val_check_interval": 2,
        **case.get("fit", {}),
    }
    devices = world if case["strategy"] != "auto" else 1
    techniques = [case_of(case["technique"]).active()] if "technique" in case else []
    t = trainer(
        ExactResume(), *techniques, *callbacks, strategy=strategy_of(case["strategy"]), devices=devices, **settings
    )
    t.fit(net, train, validation, ckpt_path=resume)
    return net, t


def _tensors(name: str, value: Any) -> dict[str, Tensor]:
    """What a state holds, by name, in dicts too."""
    if isinstance(value, dict):
        return {key: t for inner, v in value.items() for key, t in _tensors(f"{name}/{inner}", v).items()}
    return {name: local(torch.as_tensor(value)).detach().clone()}


def left(net: pl.LightningModule, t: pl.Trainer) -> dict[str, Tensor]:
    """What a run leaves on this rank: weights, its optimizer state, what was logged, random state."""
    found = {f"weights/{name}": local(value).detach().clone() for name, value in net.state_dict().items()}
    for i, optimizer in enumerate(t.optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            found |= _tensors(f"optimizer{i}/{number}", state)
    logged = {f"logged/{name}": value.detach() for name, value in t.callback_metrics.items()}
    found |= {name: value.nan_to_num(nan=NAN) for name, value in logged.items()}  # which equals itself, unlike NaN
    found["rng"] = torch.get_rng_state()
    found["steps"] = torch.tensor([t.global_step, t.current_epoch])
    return found


def resume_from_every_batch(directory: str, cases: dict[str, Settings]) -> dict[str, Any]:
    """What differs on each rank once a run was interrupted and resumed after each batch; {} of a rank where nothing does."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        folder = Path(directory, name)
        saved = case.get("saved", range(1, BATCHES))
        whole = left(*run(case, SaveBatches(folder, saved)))
        path: Path | None = None
        for batch in case.get("batches", range(1, BATCHES)):
            stop = Interrupt(folder / f"again={batch}.ckpt", batch=batch)
            run(case, stop, resume=path)
            path = stop.path
        wrong: dict[str, list[str]] = {}
        if names := differences(whole, left(*run(case, resume=path))):
            wrong["one after another"] = names
        if any(everywhere(wrong)):
            for batch in saved:
                wrong[str(batch)] = differences(whole, left(*run(case, resume=folder / f"batch={batch}.ckpt")))
        found[name] = everywhere({batch: names for batch, names in wrong.items() if names})
    return found


def losses_of(case: Settings, *callbacks: pl.Callback, resume: Path | None = None) -> list[float]:
    """The loss of each batch, a mean over the replicas."""
    recorder = Recorder()
    run(case, recorder, *callbacks, resume=resume)
    return averaged(recorder.losses) if case["strategy"] != "auto" else recorder.losses


def in_another_layout(
    directory: str, layouts: dict[str, Settings], pairs: Sequence[tuple[str, str]], batches: Sequence[int]
) -> dict[str, Any]:
    """Losses of each layout undisturbed, and of runs that go on in another one ("a in b after 4").

    Args:
        layouts: cases of :func:`run`; those not run here have their checkpoints in ``directory``.
        pairs: whose checkpoints go on in which layout.
        batches: after which.
    """
    here, found = Path(directory), dict[str, Any]()
    for name in {saved for saved, _ in pairs if not (here / saved).is_dir()}:
        found[name] = losses_of(layouts[name], SaveBatches(here / name, batches))
    for saved, name in pairs:
        for batch in batches:
            path = here / saved / f"batch={batch}.ckpt"
            found[f"{saved} in {name} after {batch}"] = losses_of(layouts[name], resume=path)
    return found


def save_after_the_fit(directory: str, cases: dict[str, Settings]) -> dict[str, Any]:
    """Whether a run that goes on from a checkpoint saved after the fit is one that never stopped; and what is refused."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        path = Path(directory, f"{name}.ckpt")
        longer = {**case, "fit": {**case.get("fit", {}), "accumulate_grad_batches": 1, "max_steps": 8}}
        whole = left(*run(longer))
        net, t = run({**longer, "fit": {**longer["fit"], "max_steps": 3}})
        t.save_checkpoint(path)
        wrong = differences(whole, left(*run(longer, resume=path)))
        found[name] = everywhere(wrong)
        if path.is_file() and int(os.environ["RANK"]) == 0:
            saved = torch.load(path, weights_only=True)
            module(case.get("name", "tiny_gpt")).load_state_dict(saved["state_dict"], strict=True)
            assert len(saved["optimizer_states"][0]["state"]) == len([*net.parameters()])
    refused = {"strategy": {"pipeline_parallel_size": 2, "gather_after_fit": False}, "fit": {"max_steps": 1}}
    _, t = run(refused)
    try:
        t.save_checkpoint(Path(directory, "gone.ckpt"))
    except RuntimeError as error:
        found["gone"] = everywhere(str(error))
    return found
