"""benchmarks.gpu: what goes wrong in a unit stays in it, nothing finished is done twice, and every unit runs in small here."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import driver, files, page, process, table
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.driver import ROOT, Unit, order, probe, run_all, run_unit, status_of
from benchmarks.gpu.units import units
from benchmarks.gpu.work import OutOfTime, Work

ENVIRONMENT = {"device": "a device", "gpu_memory_bytes": None, "torch": "2.13", "triton": None, "tiny": True}


def unit(fault: str, log: Path, *, name: str = "one", seconds: float = 30.0, **settings: Any) -> Unit:
    return Unit(name, "tests.gpu_faults", {"fault": fault, "log": str(log), **settings}, seconds=seconds)


def tried(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("nothing", "ok", None),
        ("crash", "error", "signal SIGSEGV"),
        ("out of memory", "failed", "1 of 3 rows failed: second"),
        ("illegal access", "error", "an illegal memory access"),
        ("missing", "ok", None),
        ("unfit", "ok", None),
        ("import", "skipped", "a_package_that_nobody_has"),
        ("own error", "error", "ValueError: this unit is wrong"),
    ],
)
def test_each_fault_stays_in_its_unit(fault: str, status: str, said: str | None, tmp_path: Path) -> None:
    one = unit(fault, tmp_path / "log")
    result = run_unit(one, tmp_path, ENVIRONMENT)
    assert result == json.loads((tmp_path / "gpu_one.json").read_text())
    assert result["status"] == status and result["environment"] == ENVIRONMENT and result["seconds"] >= 0
    assert result["error"] is None if said is None else said in result["error"]
    rows = {row["row"]: row for row in result["rows"]}
    goes_on = fault in ("nothing", "out of memory", "missing", "unfit")
    expected = (
        ["first", "second", "third"] if goes_on else ["first", "second"] if "error" in rows.get("second", ()) else []
    )
    assert list(rows) == expected
    kinds = {
        "out of memory": "error",
        "crash": "error",
        "illegal access": "error",
        "missing": "skipped",
        "unfit": "skipped",
    }
    if fault in kinds:
        assert kinds[fault] in rows["second"] and "value" not in rows["second"]


def test_a_hanging_unit_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    one = unit("hang", tmp_path / "log", seconds=6.0)
    began = time.monotonic()
    result = run_unit(one, tmp_path, ENVIRONMENT)
    assert time.monotonic() - began < 60
    assert result["status"] == "timeout" and "stopped after 6 s" in result["error"]
    assert [row["row"] for row in result["rows"]] == ["first", "second"] and "stopped" in result["rows"][1]["error"]
    pids = list(map(int, (tmp_path / "log.pids").read_text().split()))
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(map(alive, pids))
    # what hung is passed over when it goes on, the rest is done, and what was done is kept
    result = run_unit(one, tmp_path, ENVIRONMENT)
    assert tried(tmp_path / "log") == ["first", "second", "third"]
    assert result["status"] == "failed" and [row["row"] for row in result["rows"]] == ["first", "second", "third"]
    assert result["seconds"] > 5, "the seconds of both"


def test_the_driver_killed_in_the_middle(tmp_path: Path) -> None:
    """Its file is whole, its unit ends within a second or two, and the next call goes on where it was."""
    log, out = tmp_path / "log", tmp_path / "out"
    code = (
        "from tests.test_gpu_benchmark import *\n"
        f"run_unit(unit('hang', Path({str(log)!r}), seconds=80), Path({str(out)!r}), ENVIRONMENT)"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, env=variables)
    deadline = time.monotonic() + 120
    while not Path(f"{log}.pids").exists() and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    result = json.loads((out / "gpu_one.json").read_text())
    assert result["status"] == "running" and [row["row"] for row in result["rows"]] == ["first"]
    pids = list(map(int, Path(f"{log}.pids").read_text().split()))
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
    assert not list(out.glob(".gpu*")), "no half-written file"
    again = unit("hang", log, seconds=80)
    assert status_of(again, [out], ENVIRONMENT) == "running"
    kept = files.read(files.file_of(out, "one"))
    assert kept is not None
    kept["settings"] = {**kept["settings"], "fault": "nothing"}  # the machine is all right again
    files.write(files.file_of(out, "one"), kept)
    result = run_unit(unit("nothing", log), out, ENVIRONMENT)
    assert result["status"] == "ok" and tried(log) == ["first", "second", "second", "third"]


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    files.write(file, {"format": 1, "good": True})
    with pytest.raises(TypeError):
        files.write(file, {"format": 1, "bad": object()})
    assert files.read(file) == {"format": 1, "good": True} and list(tmp_path.iterdir()) == [file]
    file.write_text('{"format": 1, "cut')
    assert files.read(file) is None


def test_what_is_finished_is_skipped_and_what_is_not_comes_in_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    faults = {"fine": "nothing", "broken": "illegal access", "full": "out of memory"}
    all_units = [unit(fault, log, name=name) for name, fault in faults.items()]
    shown: list[tuple[str, list[str]]] = []

    def after(result: files.Result, left: list[Unit]) -> None:
        shown.append((result["unit"], [of.name for of in left]))

    run_all(all_units, tmp_path, ENVIRONMENT, seconds=1000, after=after)
    assert shown == [("fine", ["broken", "full"]), ("broken", ["full"]), ("full", [])]
    text = table.summary(all_units, [tmp_path], ENVIRONMENT).splitlines()
    assert [line.split()[:2] for line in text[1:]] == [["fine", "ok"], ["broken", "error"], ["full", "failed"]]
    shown.clear()
    run_all(all_units, tmp_path, ENVIRONMENT, seconds=1000, after=after)
    assert [name for name, _ in shown] == ["broken", "full"], "the finished one is skipped"
    statuses = {of.name: status_of(of, [tmp_path], ENVIRONMENT) for of in all_units}
    assert statuses == {"fine": "ok", "broken": "failed", "full": "failed"}
    assert tried(log).count("first") == 3, "no row that went well was made twice"
    # another device, another version or other settings, and a finished result does not count
    for other in ({**ENVIRONMENT, "device": "another"}, {**ENVIRONMENT, "torch": "2.11"}):
        assert status_of(all_units[0], [tmp_path], other) == "new"
    assert status_of(unit("nothing", tmp_path, name="fine"), [tmp_path], ENVIRONMENT) == "new"
    # a result among others' counts too
    assert status_of(all_units[0], [tmp_path / "empty", tmp_path], ENVIRONMENT) == "ok"
    ranked = order(all_units, {"fine": "failed", "broken": "new", "full": "partial"})
    assert [of.name for of in ranked] == ["broken", "full", "fine"]


def test_none_is_begun_that_cannot_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, begun = 0.0, []

    def fake(one: Unit, *args: Any) -> files.Result:
        nonlocal now
        begun.append((now, one.name))
        now += 40.0
        return {"unit": one.name, "status": "ok"}

    monkeypatch.setattr(driver, "run_unit", fake)
    some = [unit("nothing", tmp_path, name=f"long {i}", seconds=90) for i in range(3)]
    some.append(unit("nothing", tmp_path, name="short", seconds=20))
    left = run_all(some, tmp_path, ENVIRONMENT, seconds=150, clock=lambda: now)
    assert begun == [(0.0, "long 0"), (40.0, "long 1"), (80.0, "short")] and [of.name for of in left] == ["long 2"]
    with pytest.raises(ValueError, match="at most 90"):
        Unit("longer", "module", seconds=91)


def test_a_row_for_which_no_time_is_left_is_left_for_the_next_call(tmp_path: Path) -> None:
    one = unit("nothing", tmp_path / "log", needs=1000.0)
    real = {**ENVIRONMENT, "tiny": False}
    result = run_unit(one, tmp_path, real)
    assert result["status"] == "partial" and "first" in result["error"] and not tried(tmp_path / "log")
    file = tmp_path / "a.json"
    ends = time.monotonic() + 5
    work = Work(file, {"unit": "a", "settings": {}, "environment": real, "format": 1}, ends)
    assert work.row("quick", lambda: {"x": 1}, needs=1) == {"row": "quick", "x": 1}
    with pytest.raises(OutOfTime):
        work.row("slow", lambda: {"x": 1}, needs=60)


def test_results_merge_from_bundles(tmp_path: Path) -> None:
    here, there, log = tmp_path / "here", tmp_path / "there", tmp_path / "log"
    run_unit(unit("nothing", log, name="a"), here, ENVIRONMENT)
    run_unit(unit("out of memory", log, name="b"), here, ENVIRONMENT)
    files.bundle(here, tmp_path / "bundle.json")
    assert files.unpack(tmp_path / "bundle.json", there) == ["a", "b"]
    assert files.read(there / "gpu_a.json") == files.read(here / "gpu_a.json")
    run_unit(unit("nothing", log, name="b"), there, ENVIRONMENT)
    assert files.unpack(tmp_path / "bundle.json", there) == [], "a finished one is never written over"
    with pytest.raises(ValueError, match="no bundle"):
        files.unpack(here / "gpu_a.json", there)


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.gpu.__main__.probe", lambda tiny: {**ENVIRONMENT, "has_cuda": False})
    assert main(["--out", str(tmp_path)]) == 2 and not list(tmp_path.iterdir())
    assert "expected one. Add --tiny" in capsys.readouterr().err


def test_the_driver_needs_neither_torch_nor_lightning() -> None:
    """A GPU that hangs or a broken installation hangs a unit, and never what watches over it."""
    code = "import sys, benchmarks.gpu.__main__; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not {"torch", "lightning", "numpy", "lightning_eff"} & set(done.stdout.split())


SMALL = units(tiny=True)


def test_small_and_large_are_the_same_units() -> None:
    large = units()
    names = [of.name for of in SMALL]
    parts = {
        "low precision gpt2 eager",
        "low precision gpt2 compiled",
        "memory compiled",
    }  # which arm is where is up to time
    assert {n for n in names if n[:-2] not in parts} == {of.name for of in large if of.name[:-2] not in parts}
    modules = {of.name: of.module for of in large}
    assert all(modules[of.name] == of.module for of in SMALL)
    assert len({of.name for of in large}) == len(large) and all(of.seconds <= 90 for of in large)
    kinds = [of.name.split()[0] for of in large]
    wanted = ["tests", "bandwidth", "low", "training", "memory", "largest", "ceilings", "sparse", "contract"]
    assert list(dict.fromkeys(kinds)) == wanted, "the order of their worth"
    every_arm = {arm for of in large if of.settings.get("what") == "memory" for arm in of.settings["arms"]}
    assert len(every_arm - {"compile 1.0"}) == 9
    for how in ("eager", "compiled"):
        of_gpt2 = {
            arm for of in large if of.name.startswith(f"low precision gpt2 {how}") for arm in of.settings["arms"]
        }
        assert of_gpt2 >= {
            "bf16",
            "tensorwise",
            "rowwise",
            "blockwise",
            "int8",
            "stochastic rounding",
            "torchao rowwise",
        }
    for case in ("linear", "block"):
        for how in ("eager", "compiled"):
            (one,) = (of for of in large if of.name == f"low precision {case} {how}")
            assert one.settings["width"] == 4096 and {"tensorwise", "rowwise", "blockwise", "int8"} < set(
                one.settings["arms"]
            )
    for of in large:
        for path in of.settings.get("tests", ()):
            assert (ROOT / path).is_file(), path
            assert of.settings["accelerator"] == "gpu"
        for word in [w for w in of.settings.get("keywords", "").split(" or ") if not w.startswith("not ")]:
            texts = [(ROOT / path).read_text() for path in of.settings.get("tests", ())]
            lines = [line for text in texts for line in text.splitlines() if "def test_" in line]
            assert not texts or any(word in line for line in lines), word


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    found = probe(tiny=True, seconds=280)
    found.pop("has_cuda")
    return found


def run_here(one: Unit, folder: Path, environment: dict[str, Any]) -> tuple[files.Result, str]:
    """A unit in this process, which spares the imports."""
    file = files.file_of(folder, one.name)
    given = {"unit": one.name, "module": one.module, "settings": one.settings, "needs": one.needs, "file": str(file)}
    process.run(given | {"environment": environment, "limit_seconds": one.seconds, "seconds": 280.0})
    text = file.read_text()
    return json.loads(text), text


def in_small() -> list[Any]:
    """The first of each kind is tried each time, and all if slow ones run."""
    kinds: set[Any] = set()
    found = []
    for of in SMALL:
        if not of.module.endswith("suites"):
            kind = (of.module, of.settings.get("what"), of.settings.get("compiled"), bool(of.settings.get("recipes")))
            found.append(pytest.param(of, marks=pytest.mark.slow if kind in kinds else ()))
            kinds.add(kind)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("one", in_small(), ids=lambda of: of.name)
def test_each_unit_in_small(one: Unit, tmp_path: Path, here: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    result, text = run_here(one, tmp_path, here)
    skipped = one.settings.get("what") == "largest"
    assert result["status"] == ("skipped" if skipped else "ok"), (result["error"], result["rows"])
    environment = result["environment"]
    assert (
        environment["torch"]
        and environment["tiny"]
        and {"device", "driver", "triton", "lightning", "torchao"} <= environment.keys()
    )
    rows = {row["row"]: row for row in result["rows"] if "skipped" not in row}
    assert skipped or rows
    if one.name == "ceilings":
        assert {row["format"] for row in rows.values() if "format" in row} == {
            *("float32", "tf32", "bfloat16", "float16", "float8", "int8")
        }
        assert all((row.get("tflops") or row["gigabytes_per_second"])["min"] > 0 for row in rows.values())
    elif one.name == "bandwidth":
        modules = {path.stem for path in (ROOT / "kernels").glob("[!_]*.py")}
        assert {row["module"] for row in rows.values()} == modules, "every kernel"
        assert all(row["gigabytes_per_second"]["min"] > 0 for row in rows.values())
        assert all(row.get("of_copy", row.get("of_product"))["min"] > 0 for row in rows.values())
    elif one.module.endswith("low_precision"):
        wanted = [arm for arm in one.settings["arms"] if not arm.startswith("torchao")]
        assert [name for name in rows if not name.startswith("torchao")] == wanted
        assert all(row["speedup"]["min"] > 0 and row["tflops"] > 0 for row in rows.values())
    elif one.module.endswith("sparse"):
        kernels = {name: row for name, row in rows.items() if not name.startswith("choosing")}
        assert [*kernels] == ["2:4", "2:4 tiles", "blocks, zeros 0.8", "blocks, zeros 0.9"]
        # stand-ins multiply exactly what the kernels would, in the same type
        assert all(row["speedup"]["min"] > 0 and row["difference"] < 2.0**-6 for row in kernels.values())
        assert all(row["weights"] == (1 if one.settings["case"] == "linear" else 4) for row in kernels.values())
        assert (len(rows) == 6) == (one.settings["case"] == "linear") and all(r["ms"]["min"] > 0 for r in rows.values())
    elif one.module.endswith("gpt2") and not skipped:
        assert list(rows) == one.settings["arms"]
        for row in rows.values():
            assert (row["seconds"] if one.settings["compiled"] else row["ratio"]["min"]) > 0 and row["beyond_bytes"] > 0
    elif one.module.endswith("training"):
        (row,) = rows.values()
        assert (
            row["steps"] == 6 and row["seconds"] > 0 and row["curve"][-1] == [6, row["curve"][-1][1], row["val_loss"]]
        )
        assert 0 < row["val_loss"] < 7
    for private in (platform.node(), os.getcwd(), str(tmp_path), str(Path.home())):
        assert len(private) < 3 or private not in text


def test_compiled_arms_are_held_against_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from benchmarks.gpu import gpt2
    from benchmarks.memory.measure import Turn

    taken = iter([0.2, 0.1, None])

    def fake(*args: Any) -> Any:
        now = next(taken)
        error = "" if now else "OutOfMemoryError: CUDA out of memory"
        return Turn(seconds=[now, now], beyond_bytes=3, peak_bytes=4, error=error)

    monkeypatch.setattr(gpt2, "measured_run", fake)
    settings = {"what": "memory", "arms": ["compile 1.0", "compile 0.5", "compile 0.35"], "compiled": True}
    settings |= {"batch_size": 2, "rounds": 1, "steps": 1}
    given = {"format": 1, "unit": "a", "settings": settings, "environment": ENVIRONMENT}
    work = Work(tmp_path / "a.json", given, time.monotonic() + 60)
    gpt2.run(work)
    first, second, third = work.result["rows"]
    assert "ratio" not in first and first["tokens_per_second"] == 2 * 32 / 0.2
    assert second["ratio"] == 0.5 and second["over"] == "compile 1.0"
    assert third == {"row": "compile 0.35", "out_of_memory": True}


def test_all_suites_in_small(tmp_path: Path, here: dict[str, Any]) -> None:
    """In one process: what each has of its own is which tests it names."""
    suites = [of for of in SMALL if of.module.endswith("suites")]
    assert len(suites) >= 5 and len({(of.module, of.needs, of.settings["keywords"]) for of in suites}) == 1
    settings = {**suites[0].settings, "tests": [test for of in suites for test in of.settings["tests"]]}
    result = run_unit(Unit("suites", suites[0].module, settings, suites[0].needs, driver.LIMIT), tmp_path, here)
    assert result["status"] == "ok", (result["error"], result["rows"])
    # A name of a suite may stand for all parameters of its test.
    ran = {row["row"] for row in result["rows"]}
    named = set(settings["tests"])
    assert {test if test in named else test.partition("[")[0] for test in ran} == named
    assert not any("error" in row for row in result["rows"])


# -- what README and docs say


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": 0.9 * value, "max": 1.1 * value}


def made() -> dict[str, files.Result]:
    """Results as a GPU might give them."""
    environment = {"device": "NVIDIA H100", "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0", "tiny": False}
    held = {"beyond_bytes": 2**30, "ratio": spread(1.25)}
    of: dict[str, list[dict[str, Any]]] = {
        "ceilings": [
            *(
                {"row": f"product {n}", "format": "bfloat16", "size": n, "tflops": spread(rate)}
                for n, rate in ((1, 600), (2, 800))
            ),
            {"row": "product 3", "format": "float8", "error": "RuntimeError: no"},
            {"row": "copy 64 MB", "kind": "copy", "gigabytes_per_second": spread(3000.0)},
        ],
        "tests kernels 1": [{"row": "a"}, {"row": "b", "error": "no"}, {"row": "c", "skipped": "no"}],
        "bandwidth": [
            {"row": "quantize 4", "gigabytes_per_second": spread(2000.0), "of_copy": spread(0.66)},
            {
                "row": "product in float8",
                "tflops": spread(900.0),
                "of_product": spread(1.2),
                "gigabytes_per_second": spread(1),
            },
        ],
        "low precision linear eager": [{"row": "rowwise", "speedup": spread(1.3)}],
        "low precision gpt2 eager": [{"row": "rowwise", "ratio": spread(0.8)}],
        "low precision gpt2 compiled 1": [{"row": "bf16", "seconds": 0.06}],
        "low precision gpt2 compiled 2": [{"row": "rowwise", "ratio": 0.5}],
        "low precision gpt2 compiled 3": [{"row": "int8", "seconds": 0.08}],
        "sparse linear": [
            {"row": "2:4 tiles", "speedup": spread(1.4), "difference": 0.001},
            {"row": "choosing 2:4 tiles", "ms": spread(0.3)},
        ],
        "sparse block": [{"row": "2:4", "speedup": spread(1.1)}],
        "memory 1": [{"row": "full", **held}, {"row": "plain", "out_of_memory": True}],
        "largest batch 1": [{"row": "full", "largest_batch": 96, "items_per_second": 123456.0}],
        "training plain": [
            {"row": "training", "steps": 400, "seconds": 40.0, "tokens_per_second": 1e5, "val_loss": 1.5}
        ],
    }
    return {name: {"environment": environment, "rows": rows} for name, rows in of.items()}


def test_the_pages_say_what_the_results_say_or_that_there_are_none(tmp_path: Path) -> None:
    text = "# A\n<!-- gpu: {} -->\nold: 4711 times\n<!-- end of gpu -->\nB\n"
    told = {name: page.filled(text.format(name), made()) for name in page.SECTIONS}
    for name, section in told.items():
        assert (
            section.startswith("# A\n<!-- gpu:")
            and section.endswith("<!-- end of gpu -->\nB\n")
            and "4711" not in section
        )
        assert "Measured on NVIDIA H100, driver 580.1, torch 2.11.0, Triton 3.6.0" in section, name
        assert page.filled(section, made()) == section
        nothing = page.filled(text.format(name), {})
        assert "No GPU was at hand" in nothing and "4711" not in nothing and not any(c.isdigit() for c in nothing)
    assert "| bfloat16 | 800 TFLOP/s |" in told["ceilings"] and "| copy | 3000 GB/s |" in told["ceilings"]
    assert "float8" not in told["ceilings"]
    assert "| tests kernels 1 | 1 | 1 | 1 |" in told["tests"]
    assert "| quantize 4 | 2000 GB/s | 0.66 (0.59 to 0.73) of a copy |" in told["kernels"]
    assert "| product in float8 | 900 TFLOP/s | 1.20 (1.08 to 1.32) of bfloat16 |" in told["kernels"]
    assert "| speed-up over bfloat16 | linear eager | gpt2 eager | gpt2 compiled |" in told["low precision"]
    assert "| rowwise | 1.30 (1.17 to 1.43) | 1.25 (1.14 to 1.39) | 2.00 |" in told["low precision"]
    assert "| int8 | - | - | 0.75 |" in told["low precision"], "each in a process of its own"
    assert "| 2:4 tiles | 1.40 (1.26 to 1.54) | - |" in told["sparse"] and "choosing" not in told["sparse"]
    assert "| 2:4 | - | 1.10 (0.99 to 1.21) |" in told["sparse"]
    assert "| full | 1.25 (1.12 to 1.38) | 1,024 | 96 | 123,456 |" in told["memory"]
    assert "| plain | - | out of memory | - | - |" in told["memory"]
    assert "| plain | 400 | 40 | 100,000 | 1.5000 |" in told["training"]
    with pytest.raises(KeyError):
        page.filled(text.format("unknown"), {})


def test_results_of_a_cpu_are_none_of_a_gpu(tmp_path: Path) -> None:
    for name, tiny in (("a", True), ("b", False)):
        result = {"format": 1, "unit": name, "status": "ok", "rows": [{"row": "x"}], "environment": {"tiny": tiny}}
        files.write(files.file_of(tmp_path, name), result)
    assert list(page.committed(tmp_path)) == ["b"]


def test_the_pages_are_as_the_committed_results_have_them() -> None:
    results = page.committed()
    marked = set[str]()
    for path in page.PAGES:
        text = path.read_text()
        assert page.filled(text, results) == text, path
        marked |= set(page.MARKED.findall(text))
        predicted = re.compile(r"<!-- kernels static -->.*<!-- end of kernels static -->", re.DOTALL)
        outside = predicted.sub("", page.MARKED.sub("", text))
        devices = {result["environment"]["device"] for result in results.values()}
        named = {gpu for gpu in ("H100", "H200") if gpu in outside}
        assert "was at hand" not in outside and all(any(gpu in device for device in devices) for gpu in named), path
    assert marked == set(page.SECTIONS)


def test_what_is_said_of_a_gpu_in_words_is_in_the_results() -> None:
    results = page.committed()
    said = (ROOT / "docs" / "verdicts.md").read_text()
    plain, copy, compiled = (results[f"training {name}"]["rows"][0] for name in ("plain", "copy", "compiled"))
    stack = results["training muon compiled fused"]["rows"][0]
    ratio = compiled["tokens_per_second"] / plain["tokens_per_second"]
    said = " ".join(said.split())
    assert f"processes {ratio:.2f} times the tokens per second of eager GPT-2" in said
    assert f"After 25 s its loss is {compiled['val_loss']:.3f} nats per byte" in said
    assert f"eager GPT-2 has {plain['val_loss']:.3f} (one seed; {copy['val_loss']:.3f} with another)" in said
    at = next(seconds for _, seconds, loss in stack["curve"] if loss <= plain["val_loss"])
    below = next(seconds for _, seconds, loss in stack["curve"] if loss <= compiled["val_loss"])
    readme = " ".join((ROOT / "benchmarks" / "README.md").read_text().split())
    assert f"After {at:.1f} s it reaches the plain arm's loss after 25 s. After {below:.0f} s it is below" in readme
    of_copy = {
        row["row"]: f"{row['of_copy']['median']:.2f}" for row in results["bandwidth"]["rows"] if "of_copy" in row
    }
    layer, rms = ([of_copy[f"{kind} norm: {way}"] for way in ("forward", "backward")] for kind in ("layer", "rms"))
    assert f"{layer[0]} (layer norm) and {rms[0]} (RMS norm) forward, {layer[1]} and {rms[1]} backward" in said


# -- the suites


def test_the_tests_compute_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("tests.models")
    asked: list[str] = []
    monkeypatch.setattr(models.pl, "Trainer", lambda **settings: asked.append(settings["accelerator"]))
    models.trainer()
    monkeypatch.setenv("LIGHTNING_EFF_TEST_ACCELERATOR", "gpu")
    models.trainer()
    models.trainer(accelerator="cpu")
    assert asked == ["cpu", "gpu", "cpu"]


def suite(tmp_path: Path, text: str, **more: Any) -> Unit:
    (tmp_path / "test_made.py").write_text(text)
    settings = {"tests": [str(tmp_path / "test_made.py")], "keywords": "", "accelerator": "cpu", **more}
    return Unit("made", "benchmarks.gpu.suites", settings, ("pytest",))


MADE = """
import os, pytest

def test_a(): assert os.environ["LIGHTNING_EFF_TEST_ACCELERATOR"] == "cpu"

def test_b(): raise RuntimeError("a difference of 3")

@pytest.mark.skip(reason="not here")
def test_c(): ...

def test_d(): raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_e(): ...
"""


def test_a_suite_ends_where_the_device_no_longer_answers_and_goes_on_behind(tmp_path: Path) -> None:
    one = suite(tmp_path, MADE)
    result = run_unit(one, tmp_path / "out", ENVIRONMENT)
    told = {row["row"].split("::")[1]: row for row in result["rows"]}
    assert list(told) == ["test_a", "test_b", "test_c", "test_d"], "what comes after it would fail too"
    assert result["status"] == "error" and "illegal memory access" in result["error"]
    assert "error" not in told["test_a"] and told["test_b"]["error"] == "RuntimeError: a difference of 3"
    assert "not here" in told["test_c"]["skipped"]
    result = run_unit(one, tmp_path / "out", ENVIRONMENT)
    names = [row["row"].split("::")[1] for row in result["rows"]]
    assert sorted(names) == ["test_a", "test_b", "test_c", "test_d", "test_e"] and result["status"] == "failed"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("case", ["no such module", "nothing selected"])
def test_a_suite_of_which_nothing_runs_is_no_success(case: str, workers: int, tmp_path: Path) -> None:
    """A worker's pytest ends with the code of a failed test where a file cannot be imported."""
    pytest.importorskip("xdist")
    text, keywords = (
        ("import no_such_module\n" + MADE, "") if case == "no such module" else (MADE, "test_none_is_named_so")
    )
    one = suite(tmp_path, text, workers=workers, keywords=keywords)
    result = run_unit(one, tmp_path / "out", {**ENVIRONMENT, "tiny": workers == 1})
    assert result["rows"] == [] and result["status"] == "error"


def test_a_suite_on_several_workers(tmp_path: Path) -> None:
    """A worker that the device no longer answers ends itself, and another one does what is left."""
    pytest.importorskip("xdist")
    one = suite(tmp_path, MADE, workers=2)
    result = run_unit(one, tmp_path / "out", {**ENVIRONMENT, "tiny": False})
    told = {row["row"].split("::")[1]: row for row in result["rows"]}
    assert sorted(told) == ["test_a", "test_b", "test_c", "test_d", "test_e"] and len(result["rows"]) == 5
    assert {name for name, row in told.items() if "error" in row} == {"test_b", "test_d"}
    assert result["status"] == "failed"
