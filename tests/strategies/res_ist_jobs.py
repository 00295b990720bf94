"""What the processes of the tests of ResIST run: ``python -m tests.strategies.res_ist_jobs DIRECTORY JOB ...``."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_eff.strategies.res_ist import ResIST
from tests.models import TinyClassifier, TinyGPT, flat, hugging_face, loader, make_batch, module, trainer
from tests.runs import checkpoints, differences, final_state, fit, resume_from_batches
from tests.strategies.communication_launch import alike, gathered, main

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 40}


def block_of(name: str) -> int | None:
    """The block that a parameter of ``TinyGPT`` is of."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[int]:
    """The blocks some of whose parameters are others than before."""
    blocks = (block_of(name) for name, w in after.items() if not torch.equal(w, before[name]))
    return {block for block in blocks if block is not None}


def over_holders(own: dict[str, Tensor], held: set[int]) -> dict[str, Tensor]:
    """The mean of each parameter over the ranks that have moved its block in the round, computed here."""
    ranks = gathered((own, held))
    means = {}
    for name in own:
        block = block_of(name)
        some = [weights[name].double() for weights, blocks in ranks if block is None or block in blocks]
        means[name] = torch.stack(some).mean(0)
    return means


class Watch(pl.Callback):
    """Before the technique: which blocks each step moves, and at what ranks should meet."""

    def __init__(self) -> None:
        self.moves: list[set[int]] = []
        self.stepped: list[dict[str, Tensor]] = []
        self.since: set[int] = set()
        self.means: list[dict[str, Tensor]] = []
        self.states: list[dict[str, int]] = []

    def weights(self, net: pl.LightningModule) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in net.named_parameters()}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.before = self.weights(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        after = self.weights(pl_module)
        self.moves.append(moved(self.before, after))
        self.stepped.append(after)
        if len(self.moves) % 3 == 2:  # a round begins with the second step
            self.since = set()
        self.since = self.since | self.moves[-1]
        self.means.append(over_holders(after, self.since))
        (optimizer,) = trainer.optimizers
        named = pl_module.named_parameters()
        self.states.append({n: int(optimizer.state[p]["step"]) for n, p in named if optimizer.state.get(p)})


class After(pl.Callback):
    """After the technique: what ranks hold then."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.alike: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.weights.append({name: p.detach().clone() for name, p in pl_module.named_parameters()})
        self.alike.append(alike(flat(pl_module)))


def rounds(name: str, root: Path) -> dict[str, Any]:
    """Which blocks ranks train, what they meet at, and what becomes of momenta."""
    watch, after = Watch(), After()
    pl.seed_everything(1, verbose=False)
    net, technique = TinyGPT(4, dropout=0.0), ResIST(interval=3)
    trainer(watch, technique, after, max_steps=12, strategy="ddp", devices=2).fit(net, loader("tiny_gpt", 60))
    every = gathered(watch.moves)
    wrong = [step for step, held in enumerate(zip(*every, strict=True)) if set().union(*held) != set(range(4))]
    for i in range(1, 12, 3):  # the same blocks in a whole round
        wrong += [i for moves in every if any(moves[j] != moves[i] for j in range(i, min(i + 3, 12)))]
    met = [i for i in range(1, 12) if i % 3 == 0]
    error = max(float((after.weights[i][n] - m).abs().max()) for i in met for n, m in watch.means[i].items())
    from_all = 0.0
    for i in met:
        others = gathered(watch.stepped[i])
        for n, w in after.weights[i].items():
            mean = torch.stack([other[n] for other in others]).mean(0)
            from_all = max(from_all, float((w - mean).abs().max()))
    received = fresh = kept = gone_on = 0
    for i in (4, 7, 10):  # the first step of each round but one
        for n, count in watch.states[i].items():
            block = block_of(n)
            if block is None or block not in watch.moves[i]:
                continue
            if block in watch.moves[i - 1]:
                kept, gone_on = kept + 1, gone_on + (count == watch.states[i - 1][n] + 1)
            else:
                received, fresh = received + 1, fresh + (count == 1)
    sums = [sum(one) for one in zip(*gathered((received, fresh, kept, gone_on)), strict=True)]
    return {
        "wrong": wrong,
        "held": [[len(moves[i]) for moves in every] for i in range(12)],
        "deals": sorted({str(sorted(moves[i])) for moves in every for i in (1, 4, 7, 10)}),
        "met": after.alike,
        "meetings": len(met),
        "error": max(gathered(error)),
        "from_all": from_all,
        "received": sums[0],
        "fresh": sums[1],
        "kept": sums[2],
        "gone_on": sums[3],
        "branch": branch(scaled=True),
        "unscaled": branch(scaled=False),
    }


def branch(*, scaled: bool) -> float:
    """How often the branch of a held block counts in a round's step, of what the block itself adds."""

    class Look(pl.Callback):
        seen: list[float] = []

        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            self.handles = []
            if trainer.global_step < 1:
                return
            for block in pl_module.blocks:
                inner = type(block).forward

                def see(m: Any, inputs: Any, output: Tensor, inner: Any = inner) -> None:
                    with torch.no_grad():
                        own = inner(m, inputs[0]) - inputs[0]
                        if float((output - inputs[0]).norm()) > 0:
                            self.seen.append(float((output - inputs[0]).norm() / own.norm()))

                self.handles.append(block.register_forward_hook(see))

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            for handle in self.handles:
                handle.remove()

    look = Look()
    look.seen = []
    pl.seed_everything(1, verbose=False)
    technique = ResIST(interval=3, scaled=scaled)
    trainer(technique, look, max_steps=3, strategy="ddp", devices=2).fit(
        TinyGPT(4, dropout=0.0), loader("tiny_gpt", 40)
    )
    return sum(look.seen) / len(look.seen)


def resume(name: str, root: Path) -> dict[str, Any]:
    """Resume from where ranks met and from mid-round; and what all checkpoints hold."""

    def build() -> list[Any]:
        return [ResIST(interval=3)]

    class Means(pl.Callback):
        """The mean over holders of all ranks' own weights after each step, computed here."""

        means: dict[int, dict[str, Tensor]] = {}
        since: set[int] = set()

        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            self.before = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            after = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
            held = moved(self.before, after)
            if trainer.global_step % 3 == 1:  # ranks have met
                self.means[trainer.global_step] = {n: w.double() for n, w in after.items()}
                return
            self.since = held if trainer.global_step % 3 == 2 else self.since | held
            self.means[trainer.global_step] = over_holders(after, self.since)

    directory = root / "rounds"
    means = Means()
    net, t = fit("tiny_gpt", build, directory=directory, callbacks=[means], **DDP)
    whole = final_state(net, t)
    same = alike(flat(net))
    saved = checkpoints(directory)
    dist.barrier()
    found: dict[str, list[str]] = {}
    error, sizes, checked = 0.0, [], 0
    for path in saved:
        names: list[str] = []
        if path in saved[:3] + saved[4:7] + saved[-1:]:
            names = differences(whole, final_state(*fit("tiny_gpt", build, resume=path, **DDP)))
        if path is saved[-1]:
            names = [key for key in names if key not in ("rng", "steps")]
        if names:
            found[path.stem] = names
        checkpoint = torch.load(path, weights_only=True)
        again = module("tiny_gpt")
        again.load_state_dict(checkpoint["state_dict"], strict=True)
        for key, mean in means.means[checkpoint["global_step"]].items():
            error = max(error, float((again.get_parameter(key).double() - mean).abs().max()))
        checked += 1
        state = next(value for key, value in checkpoint["callbacks"].items() if key.startswith("ResIST"))
        sizes.append([len(state["weights"]), len(state["optimizers"])])
    return {
        "differences": gathered(found),
        "alike": same,
        "error": error,
        "checked": checked,
        "sizes": sizes,
        "windows": gathered(resume_from_batches("tiny_gpt", build, root / "windows", (2, 5, 7), **DDP)),
    }


def t5(name: str, root: Path) -> dict[str, Any]:
    """A stack whose blocks hand on what its first one makes."""
    pl.seed_everything(1, verbose=False)
    net, technique = hugging_face("t5", 5), ResIST(interval=2, layers="model.decoder.block")
    data: Any = [make_batch("t5", seed=7 * dist.get_rank() + i) for i in range(4)]
    t = trainer(technique, max_steps=4, strategy="ddp", devices=2, use_distributed_sampler=False)
    t.fit(net, torch.utils.data.DataLoader(data, batch_size=None))
    vector = flat(net)
    blocks = gathered(technique.report()["blocks"])
    return {"finite": bool(vector.isfinite().all()), "alike": alike(vector), "blocks": blocks}


class Narrowing(TinyClassifier):
    """Each block returns fewer numbers than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8 - i, 7 - i), nn.Tanh()) for i in range(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def narrowing(name: str, root: Path) -> dict[str, Any]:
    """What is told where no block can be passed over, long before the first round, and whether weights had moved."""
    net, told = Narrowing(), ""
    before = flat(net)
    t = trainer(ResIST(interval=2, warmup_steps=100, layers="blocks"), max_steps=3, strategy="ddp", devices=2)
    try:
        t.fit(net, loader("classifier"))
    except ValueError as error:
        told = str(error)
    return {"told": told, "moved": not torch.equal(before, flat(net))}


if __name__ == "__main__":
    main((rounds, resume, t5, narrowing))
