"""What a run holds, logs, predicts and leaves behind in each layout; first weights; precision plugins."""

from typing import Any

import pytest

from tests.strategies.hybrid_jobs import Settings, observe_logs, observe_precision
from tests.strategies.launch import launch

JOBS = "tests.strategies.hybrid_jobs"
DP2_PP2: Settings = {"pipeline_parallel_size": 2}
TP2_DP2: Settings = {"tensor_parallel_size": 2}
TP2_PP2: Settings = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
FEW: dict[str, Any] = {
    "shares": {"tp2_pp2": TP2_PP2, "copies": {"shard": 2}},
    "logs": {"tp2_pp2": TP2_PP2},
    "traces": {"tp2_dp2": TP2_DP2},
    "starts": {"dp2_pp2": DP2_PP2},
    "precision": {"dp2_pp2": DP2_PP2},
    "precisions": ["bf16-mixed", "fp8", "16-mixed"],
}
ALL_LAYOUTS: dict[str, Settings] = {
    "dp4": {},
    "dp2_pp2": DP2_PP2,
    "tp2_dp2": TP2_DP2,
    "tp2_pp2": TP2_PP2,
    "pp4": {"pipeline_parallel_size": 4},
    "copies": {"shard": 2},
}
ALL: dict[str, Any] = {
    "shares": ALL_LAYOUTS,
    "logs": ALL_LAYOUTS,
    "traces": ALL_LAYOUTS | {"replicas": {"shard": False}},
    "starts": ALL_LAYOUTS | {"replicas": {"shard": False}},
    "precision": {"dp4": {}, "dp2_pp2": DP2_PP2, "tp2_dp2": TP2_DP2},
    "precisions": ["bf16-mixed", "bf16-true", "fp8", "act", "16-mixed"],
}
TOLERANCE = {"bf16-mixed": 4e-3, "bf16-true": 6e-2, "fp8": 2e-2, "act": 1e-2}


def check(asked: dict[str, Any]) -> None:
    found = launch(JOBS, "observe", asked, world_size=4)
    for name, ranks in found["shares"].items():
        for parameters, state in ranks:
            share = 1 / 2 if name == "copies" else 1 / 4
            assert parameters == pytest.approx(share, rel=0.05), name
            assert state == pytest.approx(share, rel=0.05), name
    _check_logs(found["logs"])
    assert {name: changed for name, changed in found["traces"].items() if changed} == {}
    _check_starts(found["starts"])
    _check_precision(found["precision"], asked["precisions"])
    for name, message in found["refused"].items():
        assert name in message and "shard=False" in message, f"{name}: {message}"


def _check_logs(logs: dict[str, Any]) -> None:
    (alone,) = observe_logs("auto", 1)["ranks"]
    rows = [row for batch in alone["predicted"] for row in batch]
    for name, run in logs.items():
        replicas = 4 if name in ("dp4", "copies") else 2 if "dp2" in name else 1
        for rank in run["ranks"]:
            assert rank["logged"].keys() == alone["logged"].keys(), name
            assert rank["again"] == pytest.approx({k: rank["logged"][k] for k in rank["again"]}), name
            assert rank["logged"]["val_synced"] == pytest.approx(alone["logged"]["val_synced"], abs=1e-5), name
            assert rank["logged"]["trained"] == alone["logged"]["trained"], name
            assert rank["logged"]["val_seen"] == alone["logged"]["val_seen"], name
            assert rank["logged"]["val_right"] == pytest.approx(alone["logged"]["val_right"], abs=1e-6), name
            assert rank["logged"]["val_sum"] == pytest.approx(replicas * alone["logged"]["val_sum"], rel=1e-5), name
            assert rank["weights"] == pytest.approx(alone["weights"], abs=1e-2), name
            if replicas == 1:
                assert rank["logged"] == pytest.approx(alone["logged"], abs=1e-5), name
                assert rank["predicted"] == alone["predicted"], name
            else:
                assert all(row in rows for batch in rank["predicted"] for row in batch), name


def _check_starts(starts: dict[str, Any]) -> None:
    losses: dict[str, list[float]] = {}
    for name, run in starts.items():
        where, layout = name.split()
        # labels are padded: micro-batches weigh as they should, also where their rule was found after the cut
        assert run["losses"] == pytest.approx(losses.setdefault(where, run["losses"]), abs=1e-5), name
        assert run["losses"][0] == pytest.approx(4.2, abs=0.3), "first weights were not made as the module makes them"
        assert len(set(run["weights"])) == 1, f"{name}: ranks ended with other weights"
        parted = layout != "replicas"  # of which each process has the whole anyway
        assert (run["meta"] > 0) == (where == "meta" and parted), name
    assert losses["rank0"] == pytest.approx(losses["all"], abs=1e-5)
    assert losses["meta"] != pytest.approx(losses["all"], abs=1e-5)


def _check_precision(found: dict[str, Any], precisions: list[str]) -> None:
    alone = observe_precision([p for p in precisions if p != "16-mixed"], {"alone": {}}, 1)
    for name, losses in found.items():
        precision = name.rpartition(" ")[0]
        if precision == "16-mixed":
            assert "gradient scaler" in losses and "bf16-mixed" in losses, name
        else:
            assert losses == pytest.approx(alone[f"{precision} alone"], abs=TOLERANCE[precision]), name


def test_four_processes_hold_log_and_leave_what_they_should() -> None:
    check(FEW)


@pytest.mark.slow  # every layout: minutes
@pytest.mark.timeout(3600)
def test_every_layout_holds_logs_and_leaves_what_it_should() -> None:
    check(ALL)
