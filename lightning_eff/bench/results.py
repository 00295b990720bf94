"""Read and write ``results.json``, and check its schema."""

import json
import math
import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

SCHEMA = "lightning_eff.bench/1"
FILE_NAME = "results.json"

KINDS = ("baseline", "recipe", "control", "ladder")
STATUSES = ("finished", "crashed", "diverged")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite_number(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _pair(value: Any, first: Callable[[Any], bool], second: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and first(value[0]) and second(value[1])


#: The types of fields: a description, and a check of a value.
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a text", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "whole": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "number": ("a finite number", _finite_number),
    "figure": ("a number", _number),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "point": (
        "[seconds, value], where the value is a number or null",
        lambda value: _pair(value, _finite_number, lambda v: v is None or _number(v)),
    ),
    "rates": (
        "[baseline, arm] in samples/s, > 0",
        lambda value: _pair(value, *[lambda v: _finite_number(v) and v > 0] * 2),
    ),
}


# The type of a field is a name from _CHECKS, with "?" if null is allowed; a tuple of possible texts; a list with the type of
# its entries; or a dict of an object's fields.
_MACHINE = {"cpu": "text", "cores": "whole", "memory_bytes": "whole", "gpu": "text?", "driver": "text?", "os": "text"}
_MACHINE |= {"python": "text", "torch": "text", "lightning": "text", "lightning_eff": "text", "threads": "whole"}
_MACHINE |= {"git": "object?"}
_ARM = {"name": "text", "kind": KINDS, "of": "text?", "factor": "number", "description": "text", "configs": ["text"]}
_BUDGET = {"seconds": "number", "clock": ("reference", "wall")}
_PLAN = {"target": "text", "mode": ("min", "max"), "budget": _BUDGET, "seeds": ["whole"], "threads": "whole"}
_PLAN |= {"evaluations": "whole", "schedule": ("own", "linear", "cosine"), "arms": [_ARM]}
_PRICE = {"kind": "text", "seconds": "number", "share": "number"}
_CALIBRATION = {"steps": "whole", "step_seconds": "number", "same_training": "bool", "rates": ["rates"]}
_CALIBRATION |= {"prices": [_PRICE], "lr": "object"}
_POINT = {"seconds": "number", "wall_seconds": "number", "step": "whole", "samples": "whole", "tokens": "whole"}
_POINT |= {"metric": "figure?"}
_RUN = {"arm": "text", "seed": "whole", "status": STATUSES, "error": "text?", "points": [_POINT], "losses": ["point"]}
_RUN |= {"memory": ["point"], "seconds": "number", "wall_seconds": "number", "setup_seconds": "number"}
_RUN |= {"warmup_seconds": "number", "validation_seconds": "number", "extra_seconds": "number"}
_RUN |= {"forward_passes": "whole", "steps": "whole", "samples": "whole", "tokens": "whole"}
_RUN |= {"peak_memory_bytes": "whole", "memory_kind": ("resident", "allocated"), "energy_joules": "number?"}
_RUN |= {"lr_last_share": "number?", "uncalibrated_share": "number", "notes": ["text"]}
_RESULTS = {"title": "text", "created": "text", "finished": "text?", "plan": _PLAN, "calibration": "object"}
_RESULTS |= {"machine": _MACHINE, "runs": [_RUN]}


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a bench's results.

    Args:
        path: the folder that a bench wrote, or the ``results.json`` in it.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not JSON, or does not follow the schema.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file. Give the folder of a bench, or its {FILE_NAME}.")
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}). Give the {FILE_NAME} of a bench.") from None
    try:
        validate(results)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return results


def save(results: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Check results and write them atomically.

    Numbers that are not finite, such as a diverged run's metric, are written as null.

    Args:
        results: results of the schema.
        path: a folder, or a file name that ends in ``.json``.

    Returns:
        The file.

    Raises:
        ValueError: if the results do not follow the schema.
    """
    plain = _finite(results)
    validate(plain)
    file = Path(path)
    if file.suffix != ".json":
        file = file / FILE_NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, plain)
    return file


def write_json(file: Path, record: Any) -> None:
    """Write a record atomically, by renaming a temporary file."""
    temporary = file.with_suffix(f".{os.urandom(4).hex()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(record, stream, ensure_ascii=False, indent=1)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def now() -> str:
    """Return the present time as text, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _finite(value: Any) -> Any:
    """Return the same structure with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def validate(results: Any) -> None:
    """Check that results follow the schema, and ignore further fields.

    Metrics, losses and memory may be null or not finite, as in diverged runs. All other numbers must be finite.

    Raises:
        ValueError: with the place, the value and the expected type.
    """
    if isinstance(results, dict) and results.get("schema") != SCHEMA:
        raise ValueError(
            f"schema: got {results.get('schema')!r}, but this version of lightning_eff reads {SCHEMA!r}. "
            f"Use the version that wrote it, or run the bench again."
        )
    _check(results, _RESULTS, "results")
    if results["machine"]["git"] is not None:
        _check(results["machine"]["git"], {"revision": "text", "dirty": "bool"}, "results.machine.git")
    _plan(results["plan"])
    names, seeds = [arm["name"] for arm in results["plan"]["arms"]], results["plan"]["seeds"]
    for name, calibration in results["calibration"].items():
        _known(name, names, "calibration", "arm of the plan")
        _check(calibration, _CALIBRATION, f"calibration[{name!r}]")
        if calibration["same_training"] and not calibration["rates"]:
            raise ValueError(f"calibration[{name!r}].rates: got none; expected some, because same_training is true.")
    seen = set()
    for index, run in enumerate(results["runs"]):
        where = f"runs[{index}]"
        _known(run["arm"], names, f"{where}.arm", "arm of the plan")
        _known(run["seed"], seeds, f"{where}.seed", "seed of the plan")
        if (run["arm"], run["seed"]) in seen:
            raise ValueError(
                f"{where}: arm {run['arm']!r} with seed {run['seed']} occurs twice; expected one run each."
            )
        seen.add((run["arm"], run["seed"]))
        if run["status"] == "finished" and not run["points"]:
            raise ValueError(f"{where}.points: got none in a finished run; expected at least the last evaluation.")
        for number, (before, after) in enumerate(pairwise(point["seconds"] for point in run["points"]), 1):
            if after < before:
                raise ValueError(f"{where}.points[{number}].seconds: got {after} after {before}; expected a rise.")


def _plan(plan: dict[str, Any]) -> None:
    if plan["budget"]["seconds"] <= 0:
        raise ValueError(f"plan.budget.seconds: got {plan['budget']['seconds']}; expected > 0.")
    if not plan["seeds"] or len(set(plan["seeds"])) < len(plan["seeds"]):
        raise ValueError(f"plan.seeds: got {plan['seeds']}; expected at least one, each once.")
    if not plan["arms"]:
        raise ValueError("plan.arms: got none; expected the baseline first, then the others.")
    names = [arm["name"] for arm in plan["arms"]]
    if len(set(names)) < len(names):
        raise ValueError(f"plan.arms: got the names {names}; expected each once.")
    recipes = [arm["name"] for arm in plan["arms"] if arm["kind"] == "recipe"]
    for index, arm in enumerate(plan["arms"]):
        where = f"plan.arms[{index}]"
        if (arm["kind"] == "baseline") != (index == 0):
            raise ValueError(
                f"{where}.kind: got {arm['kind']!r}; expected the first arm, and no other, to be 'baseline'."
            )
        if arm["factor"] <= 0 or (arm["kind"] == "ladder") != (arm["factor"] != 1):
            raise ValueError(
                f"{where}.factor: got {arm['factor']} for a {arm['kind']}; expected 1, or for a ladder arm a factor of "
                f"the budget: > 0 and not 1."
            )
        if arm["kind"] == "control":
            _known(arm["of"], recipes, f"plan.arms: 'of' of the control {arm['name']!r}", "recipe of the plan")


def _check(value: Any, expected: Any, where: str) -> None:
    """Raise ``ValueError`` unless ``value`` has the expected type."""
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: got {_short(value)}; expected an object with {', '.join(expected)}.")
        for name, inner in expected.items():
            if name not in value:
                raise ValueError(f"{where}.{name}: missing; expected {_described(inner)}.")
            _check(value[name], inner, f"{where}.{name}")
    elif isinstance(expected, list) and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, expected[0], f"{where}[{index}]")
    elif isinstance(expected, list | tuple):
        if isinstance(expected, list) or value not in expected:
            raise ValueError(f"{where}: got {_short(value)}; expected {_described(expected)}.")
    elif not (expected[-1] == "?" and value is None) and not _CHECKS[expected.rstrip("?")][1](value):
        raise ValueError(f"{where}: got {_short(value)}; expected {_described(expected)}.")


def _described(expected: Any) -> str:
    if isinstance(expected, tuple):
        return "one of " + ", ".join(map(repr, expected))
    if isinstance(expected, dict | list):
        return "an object" if isinstance(expected, dict) else "a list"
    return _CHECKS[expected.rstrip("?")][0] + (" or null" if expected[-1] == "?" else "")


def _known(value: Any, known: Iterable[Any], where: str, what: str) -> None:
    if value not in known:
        raise ValueError(f"{where}: got {value!r}; expected a {what}: {', '.join(map(repr, known))}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
