"""The bench's file: ``results.json``, with its schema checked by hand on the way in and on the way out."""

import json
import math
import os
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = "lightning_eff.bench/1"
FILE_NAME = "results.json"

KINDS = ("baseline", "recipe", "control", "ladder")
STATUSES = ("finished", "crashed", "diverged")

# Fields and what they hold: a type name, "?" where null is allowed too, or the words that are allowed.
_TOP = {"title": "text", "created": "text", "finished": "text?", "machine": "object", "plan": "object"}
_TOP |= {"calibration": "object", "runs": "list"}
_MACHINE = {"cpu": "text", "cores": "whole", "memory_bytes": "whole", "gpu": "text?", "driver": "text?", "os": "text"}
_MACHINE |= {"python": "text", "torch": "text", "lightning": "text", "lightning_eff": "text", "git": "object?"}
_MACHINE |= {"threads": "whole"}
_PLAN = {"target": "text", "mode": ("min", "max"), "budget": "object", "seeds": "list", "threads": "whole"}
_PLAN |= {"evaluations": "whole", "schedule": ("own", "linear", "cosine"), "arms": "list"}
_BUDGET = {"seconds": "number", "clock": ("reference", "wall")}
_ARM = {"name": "text", "kind": KINDS, "of": "text?", "factor": "number", "description": "text", "configs": "list"}
_CALIBRATION = {"steps": "whole", "step_seconds": "number", "same_training": "bool", "rates": "list", "prices": "list"}
_CALIBRATION |= {"lr": "object"}
_RUN = {"arm": "text", "seed": "whole", "status": STATUSES, "error": "text?", "points": "list", "losses": "list"}
_RUN |= {"memory": "list", "seconds": "number", "wall_seconds": "number", "setup_seconds": "number"}
_RUN |= {"warmup_seconds": "number", "validation_seconds": "number", "extra_seconds": "number"}
_RUN |= {"forward_passes": "whole", "steps": "whole", "samples": "whole", "tokens": "whole"}
_RUN |= {"peak_memory_bytes": "whole", "memory_kind": ("resident", "allocated"), "energy_joules": "number?"}
_RUN |= {"lr_last_share": "number?", "uncalibrated_share": "number", "notes": "list"}
_POINT = {"seconds": "number", "wall_seconds": "number", "step": "whole", "samples": "whole", "tokens": "whole"}
_POINT |= {"metric": "figure?"}

_CHECKS = {
    "text": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "whole": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
    "figure": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "list": lambda value: isinstance(value, list | tuple),
    "object": lambda value: isinstance(value, dict),
}


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a bench's results.

    Args:
        path: the folder that a bench wrote, or the ``results.json`` in it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, of another schema, or of another structure than the schema's.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; expected the folder of a bench, or its {FILE_NAME}.")
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); expected the {FILE_NAME} of a bench.") from None
    try:
        validate(results)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return results


def save(results: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Check results and write them whole or not at all: to a temporary file beside, which then takes the name.

    A number that is not finite, such as a diverged run's metric, is written as null, because JSON has no other word.

    Args:
        results: see the schema.
        path: a folder, or a file name that ends in ``.json``.

    Returns:
        The file that was written.

    Raises:
        ValueError: the results have another structure than the schema's.
    """
    plain = _finite(results)
    validate(plain)
    file = Path(path)
    if file.suffix != ".json":
        file = file / FILE_NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(plain, stream, ensure_ascii=False, allow_nan=False, indent=1)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's own is for the owner's eyes only
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
    return file


def write_json(file: Path, record: Any) -> None:
    """Write a record whole or not at all."""
    temporary = file.with_suffix(f".{os.urandom(4).hex()}.tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def now() -> str:
    """The time, to the second, as text."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _finite(value: Any) -> Any:
    """The same structure with None for numbers that are not finite, as JSON will give it back."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def validate(results: Any) -> None:
    """Check the structure of results; fields that the schema does not know are left alone.

    Metrics, losses and memory may be null or not finite (a diverged run has such); all other numbers are finite.

    Raises:
        ValueError: says where, what was got and what was expected.
    """
    if not isinstance(results, dict):
        raise ValueError(f"results: got {_short(results)}; expected an object of schema {SCHEMA!r}.")
    if results.get("schema") != SCHEMA:
        raise ValueError(
            f"schema: got {results.get('schema')!r}; this version of lightning_eff reads {SCHEMA!r}. "
            f"Open it with the version that wrote it, or run the bench again."
        )
    _fields(results, _TOP, "results")
    machine, plan = results["machine"], results["plan"]
    _fields(machine, _MACHINE, "machine")
    if machine["git"] is not None:
        _fields(machine["git"], {"revision": "text", "dirty": "bool"}, "machine.git")
    _plan(plan)
    names = [arm["name"] for arm in plan["arms"]]
    for name, calibration in results["calibration"].items():
        _known(name, names, "calibration", "arm of the plan")
        _calibration(calibration, f"calibration[{name!r}]")
    seen = set()
    for index, run in enumerate(results["runs"]):
        where = f"runs[{index}]"
        _run(run, where)
        _known(run["arm"], names, f"{where}.arm", "arm of the plan")
        _known(run["seed"], plan["seeds"], f"{where}.seed", "seed of the plan")
        if (run["arm"], run["seed"]) in seen:
            raise ValueError(
                f"{where}: arm {run['arm']!r} with seed {run['seed']} is there twice; expected one run each."
            )
        seen.add((run["arm"], run["seed"]))


def _plan(plan: dict[str, Any]) -> None:
    _fields(plan, _PLAN, "plan")
    _fields(plan["budget"], _BUDGET, "plan.budget")
    if plan["budget"]["seconds"] <= 0:
        raise ValueError(f"plan.budget.seconds: got {plan['budget']['seconds']}; expected > 0.")
    _every(plan["seeds"], "whole", "plan.seeds")
    if not plan["seeds"] or len(set(plan["seeds"])) < len(plan["seeds"]):
        raise ValueError(f"plan.seeds: got {plan['seeds']}; expected at least one, each once.")
    if not plan["arms"]:
        raise ValueError("plan.arms: got none; expected the baseline first, then the others.")
    for index, arm in enumerate(plan["arms"]):
        where = f"plan.arms[{index}]"
        _fields(arm, _ARM, where)
        _every(arm["configs"], "text", f"{where}.configs")
        if (arm["kind"] == "baseline") != (index == 0):
            raise ValueError(
                f"{where}.kind: got {arm['kind']!r}; expected the first arm, and no other, to be 'baseline'."
            )
        if arm["factor"] <= 0 or (arm["kind"] == "ladder") != (arm["factor"] != 1):
            raise ValueError(
                f"{where}.factor: got {arm['factor']} for a {arm['kind']}; expected 1, or for a ladder arm what it "
                f"multiplies the budget by: > 0 and not 1."
            )
    names = [arm["name"] for arm in plan["arms"]]
    if len(set(names)) < len(names):
        raise ValueError(f"plan.arms: got the names {names}; expected each once.")
    recipes = [arm["name"] for arm in plan["arms"] if arm["kind"] == "recipe"]
    for arm in plan["arms"]:
        if arm["kind"] == "control":
            _known(arm["of"], recipes, f"plan.arms: 'of' of the control {arm['name']!r}", "recipe of the plan")


def _calibration(calibration: Any, where: str) -> None:
    _fields(calibration, _CALIBRATION, where)
    for index, pair in enumerate(calibration["rates"]):
        _every(pair, "number", f"{where}.rates[{index}]")
        if len(pair) != 2 or min(pair) <= 0:
            raise ValueError(f"{where}.rates[{index}]: got {_short(pair)}; expected [baseline, arm] in samples/s, > 0.")
    if calibration["same_training"] and not calibration["rates"]:
        raise ValueError(
            f"{where}.rates: got none; expected some where same_training is true: they decide its verdict."
        )
    for index, price in enumerate(calibration["prices"]):
        _fields(price, {"kind": "text", "seconds": "number", "share": "number"}, f"{where}.prices[{index}]")


def _run(run: Any, where: str) -> None:
    _fields(run, _RUN, where)
    last = -math.inf
    for index, point in enumerate(run["points"]):
        _fields(point, _POINT, f"{where}.points[{index}]")
        if point["seconds"] < last:
            raise ValueError(f"{where}.points[{index}].seconds: got {point['seconds']} after {last}; expected a rise.")
        last = point["seconds"]
    if run["status"] == "finished" and not run["points"]:
        raise ValueError(f"{where}.points: got none in a finished run; expected at least the last evaluation.")
    for name in ("losses", "memory"):
        for index, pair in enumerate(run[name]):
            if not _CHECKS["list"](pair) or len(pair) != 2 or not _CHECKS["number"](pair[0]):
                raise ValueError(f"{where}.{name}[{index}]: got {_short(pair)}; expected [seconds, value].")
            if pair[1] is not None and not _CHECKS["figure"](pair[1]):
                raise ValueError(
                    f"{where}.{name}[{index}]: got {_short(pair)}; expected a number or null as its value."
                )
    _every(run["notes"], "text", f"{where}.notes")


def _fields(value: Any, fields: dict[str, Any], where: str) -> None:
    """Raise unless ``value`` is an object that has ``fields``."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {_short(value)}; expected an object with {', '.join(fields)}.")
    for name, expected in fields.items():
        if name not in value:
            raise ValueError(f"{where}.{name}: missing; expected {_told(expected)}.")
        got = value[name]
        if isinstance(expected, tuple):
            good = got in expected
        else:
            good = (expected[-1] == "?" and got is None) or _CHECKS[expected.rstrip("?")](got)
        if not good:
            raise ValueError(f"{where}.{name}: got {_short(got)}; expected {_told(expected)}.")


def _told(expected: str | tuple[str, ...]) -> str:
    if isinstance(expected, tuple):
        return "one of " + ", ".join(map(repr, expected))
    words = {
        "text": "a text",
        "whole": "a whole number",
        "number": "a finite number",
        "figure": "a number",
        "bool": "true or false",
    }
    words |= {"list": "a list", "object": "an object"}
    return words[expected.rstrip("?")] + (" or null" if expected[-1] == "?" else "")


def _every(values: Any, expected: str, where: str) -> None:
    if not _CHECKS["list"](values):
        raise ValueError(f"{where}: got {_short(values)}; expected a list.")
    for index, value in enumerate(values):
        if not _CHECKS[expected](value):
            raise ValueError(f"{where}[{index}]: got {_short(value)}; expected {_told(expected)}.")


def _known(value: Any, known: Iterable[Any], where: str, what: str) -> None:
    if value not in known:
        raise ValueError(f"{where}: got {value!r}; expected a {what}: {', '.join(map(repr, known))}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
