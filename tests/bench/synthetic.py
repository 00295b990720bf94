"""Made-up results of a bench, the same for the same arguments: curves of known shape, without any training."""

import math
from random import Random

SEEDS = [1, 2, 3]
BUDGET = 60.0


def arm(name, kind="recipe", of=None, factor=1.0, configs=None):
    configs = [f"configs/{name}.yaml"] if configs is None else configs
    return {
        "name": name,
        "kind": kind,
        "of": of,
        "factor": factor,
        "description": f"made up: {name}",
        "configs": configs,
    }


def results(
    gains,
    *,
    arms=None,
    seeds=SEEDS,
    budget=BUDGET,
    noise=0.01,
    spread=0.05,
    evaluations=10,
    mode="min",
    clock="reference",
):
    """Results whose arms are ``gains`` times as fast as the baseline, in a loss that falls as ``1 + 2.5 / (1 + g t)^0.7``.

    Args:
        gains: name -> factor on time; the first is the baseline's.
        arms: the plan's arms; the first is the baseline, the others are recipes unless given.
        noise: deviation of a run's final metric from its curve, beside ``spread``, which all runs of a seed share.
    """
    names = list(gains)
    arms = arms or [arm(name, "baseline" if name == names[0] else "recipe") for name in names]
    runs = [
        run(a["name"], seed, gains[a["name"]], budget * a["factor"], noise, spread, evaluations, mode)
        for seed in seeds
        for a in arms
    ]
    return {
        "schema": "lightning_eff.bench/1",
        "title": "Synthetic results",
        "created": "2026-01-02T03:04:05+00:00",
        "finished": "2026-01-02T04:04:05+00:00",
        "machine": machine(),
        "plan": {
            "target": "val_loss",
            "mode": mode,
            "budget": {"seconds": budget, "clock": clock},
            "seeds": list(seeds),
            "threads": 1,
            "evaluations": evaluations,
            "schedule": "linear",
            "arms": arms,
        },
        "calibration": {a["name"]: calibration(gains[a["name"]]) for a in arms},
        "runs": runs,
        "summary": {},
    }


def machine():
    return {
        "cpu": "Imaginary CPU 9000",
        "cores": 4,
        "memory_bytes": 16 * 2**30,
        "gpu": None,
        "driver": None,
        "os": "Linux 6.1",
        "python": "3.12.1",
        "torch": "2.13.0",
        "lightning": "2.6.6",
        "lightning_eff": "0.1.0",
        "git": {"revision": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
        "threads": 1,
    }


def calibration(gain, same_training=False):
    random = Random(f"rates {gain}")
    rates = [[200 * random.gauss(1, 0.01), 200 * gain * random.gauss(1, 0.01)] for _ in range(6)]
    prices = [{"kind": "step 128", "seconds": 0.03, "share": 0.75}, {"kind": "step 64", "seconds": 0.02, "share": 0.25}]
    lr = {"peak": 1e-3, "last": 1e-6, "peak_at": 0.05}
    shared = {"steps": 2000, "step_seconds": 0.03, "prices": prices, "lr": lr}
    return {**shared, "same_training": same_training, "rates": rates}


def run(name, seed, gain, budget, noise, spread, evaluations, mode):
    random = Random(f"{name} {seed}")
    level = Random(f"seed {seed}").gauss(0, spread) + random.gauss(0, noise)
    points, losses, memory = [], [], []
    for k in range(1, evaluations + 1):
        seconds = budget * k / evaluations
        loss = 1 + 2.5 / (1 + gain * seconds / 10) ** 0.7 + level * k / evaluations
        points.append(
            {
                "seconds": seconds,
                "wall_seconds": seconds * 1.1,
                "step": round(seconds * 30),
                "samples": round(seconds * 240 * gain),
                "tokens": round(seconds * 240 * gain) * 128,
                "metric": loss if mode == "min" else math.exp(-loss),
            }
        )
    for k in range(60):
        seconds = budget * (k + 1) / 60
        losses.append([seconds, 1 + 2.5 / (1 + gain * seconds / 10) ** 0.7 + random.gauss(0, 0.1)])
        memory.append([seconds, round((500 + 80 * gain + 2 * min(k, 20)) * 2**20)])
    last = points[-1]
    return {
        "arm": name,
        "seed": seed,
        "status": "finished",
        "error": None,
        "points": points,
        "losses": losses,
        "memory": memory,
        "seconds": budget,
        "wall_seconds": budget * 1.1 * random.gauss(1, 0.01),
        "setup_seconds": 1.5,
        "warmup_seconds": 2.5,
        "validation_seconds": 6.0,
        "extra_seconds": 5.0 if gain < 1 else 0.0,
        "forward_passes": last["step"],
        "steps": last["step"],
        "samples": last["samples"],
        "tokens": last["tokens"],
        "peak_memory_bytes": memory[-1][1],
        "memory_kind": "resident",
        "energy_joules": None,
        "lr_last_share": 0.001,
        "uncalibrated_share": 0.0,
        "notes": [],
    }


def fail(made, name, seed, status, error):
    """Let one run of ``made`` have crashed or diverged half-way."""
    for item in made["runs"]:
        if item["arm"] == name and item["seed"] == seed:
            item |= {"status": status, "error": error, "points": item["points"][:4], "memory": item["memory"][:25]}
            item |= {"losses": item["losses"][:25], "seconds": 25.0, "wall_seconds": 27.0}
            if status == "diverged":
                item["points"][-1]["metric"] = math.nan


def everything(**options):
    """One of each: a better recipe, its control, a worse, a null, one that crashed once, one that diverged, a rung."""
    arms = [
        arm("baseline", "baseline"),
        arm("stacking", configs=["configs/baseline.yaml", "configs/stacking.yaml"]),
        arm("two layers throughout", "control", of="stacking"),
        arm("sharpness"),
        arm("cosine"),
        arm("crashes once"),
        arm("diverges"),
        arm("baseline × 2", "ladder", factor=2.0),
    ]
    gains = {
        "baseline": 1.0,
        "stacking": 1.4,
        "two layers throughout": 1.36,
        "sharpness": 0.6,
        "cosine": 1.0,
        "crashes once": 1.2,
        "diverges": 1.0,
        "baseline × 2": 1.0,
    }
    made = results(gains, arms=arms, **options)
    fail(made, "crashes once", 2, "crashed", "RuntimeError: out of memory <at step 700>")
    for seed in made["plan"]["seeds"]:
        fail(made, "diverges", seed, "diverged", "the training loss is nan from step 812 on")
    return made
