"""What HybridParallelStrategy refuses, with the arithmetic or the way out; strings; no processes are started."""

import itertools
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks import context_parallel
from lightning_eff import FP8Precision
from lightning_eff.strategies._hybrid.arguments import check_optimizers, check_run
from lightning_eff.strategies._hybrid.gradients import by_lists, steps_pieces
from lightning_eff.strategies._hybrid.layout import Layout, resolve
from lightning_eff.strategies._hybrid.sharding import Root, groups, shard, sharded_parameters
from lightning_eff.strategies.compressed_ddp import CompressedDDPStrategy
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
from tests.models import TinyClassifier, loader, trainer
from tests.processes import free_port


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size=0.*integer >= 1"),
        ({"pipeline_parallel_size": 2.0}, r"pipeline_parallel_size=2\.0.*integer >= 1"),
        ({"data_parallel_size": "all"}, r"data_parallel_size='all'.*'auto' or"),
        (
            {"schedule": "2F2B"},
            r"2F2B.*GPipe, 1F1B, Interleaved1F1B, LoopedBFS, Interleaved.*, ZBV.*, DualPipeV",
        ),
        ({"num_microbatches": 0}, r"num_microbatches=0"),
        ({"min_num_params": -1}, r"min_num_params=-1.*integer >= 0"),
        ({"min_num_params": 1e6}, r"min_num_params=1000000\.0.*number of parameters"),
        ({"tensor_parallel_plan": "megatron"}, r"'auto' or a mapping .*colwise"),
        ({"pipeline_split": "even"}, r"'balanced' or a sequence, each .* such as \[3, 5\]"),
        ({"num_microbatches": 4}, r"num_microbatches=\.\.\., pipeline_parallel_size=1.*no effect"),
        ({"pipeline_split": [2, 2]}, r"pipeline_split=\.\.\., pipeline_parallel_size=1.*no effect"),
        ({"tensor_parallel_plan": {"a": "colwise"}}, r"tensor_parallel_plan=\.\.\., tensor_parallel_size=1.*no effect"),
        ({"sequence_parallel": True}, r"sequence_parallel=\.\.\., tensor_parallel_size=1.*no effect"),
        ({"shard": 0}, r"shard=0\): expected True .*integer >= 2"),
        ({"shard": 1}, r"shard=1\): expected True .*integer >= 2"),
        ({"shard": 3, "data_parallel_size": 4}, r"shard=3\): groups of 3 ranks do not divide the 4 .*one of \[2, 4\]"),
        ({"init_on": "rank1"}, r"'all', 'rank0' or 'meta': the ranks on which"),
        ({"failure_timeout": 0}, r"number > 0, or None: the seconds"),
        ({"gather_after_fit": "all"}, r"gather_after_fit='all'\): expected True or False or 'auto'"),
        ({"find_unused_parameters": True}, r"find_unused_parameters=True\): this is an option of torch's DDP"),
        ({"microbatch_weight": len}, r"microbatch_weight=\.\.\., pipeline_parallel_size=1.*no effect"),
        (
            {"microbatch_weight": "no.such.thing", "pipeline_parallel_size": 2},
            r"microbatch_weight='no.such.thing'.*cannot be imported.*dotted path",
        ),
        (
            {"microbatch_weight": "weight", "pipeline_parallel_size": 2},
            r"microbatch_weight='weight'.*cannot be imported",
        ),
        (
            {"context_parallel_size": 2, "tensor_parallel_size": 2},
            r"context_parallel_size=2, tensor_.*Set tensor_parallel_size=1",
        ),
        (
            {"context_parallel_size": 2, "pipeline_parallel_size": 2},
            r"pipeline_parallel_size=2\): context parallelism does not",
        ),
    ],
)
def test_arguments_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridParallelStrategy(**settings)


def test_a_function_of_the_micro_batch_has_a_dotted_path() -> None:
    path = f"{batch_size.__module__}.{batch_size.__name__}"
    for given in (path, batch_size):
        strategy = HybridParallelStrategy(pipeline_parallel_size=2, microbatch_weight=given)
        assert strategy.settings.microbatch_weight is batch_size
    with pytest.raises(ValueError, match=r"microbatch_weight=3\): expected a function"):
        HybridParallelStrategy(pipeline_parallel_size=2, microbatch_weight=cast("Any", 3))


def batch_size(part: Any) -> float:
    return float(len(part))


def test_flags_are_booleans() -> None:
    with pytest.raises(ValueError, match=r"shard='yes'\): expected True or False or an integer >= 2"):
        HybridParallelStrategy(shard="yes")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [HybridParallelStrategy, CompressedDDPStrategy])
def test_a_strategy_among_the_callbacks_is_told_where_it_belongs(kind: Any) -> None:
    name = kind.__name__
    run = trainer(callbacks=[kind()])
    with pytest.raises(TypeError, match=rf"^Trainer\(callbacks=\[{name}\(.* Use Trainer\(strategy={name}\("):
        run.fit(TinyClassifier(), loader("classifier"))


def test_sizes_multiply_to_the_processes() -> None:
    assert resolve("auto", 2, 2, 8, who="S") == Layout(2, 2, 2)
    assert resolve(4, 1, 2, 8, who="S") == Layout(2, 4, 1)
    with pytest.raises(ValueError, match=r"2 x 4 = 8 does not divide the 12 processes"):
        resolve("auto", 2, 4, 12, who="S")
    with pytest.raises(ValueError, match=r"3 x 2 x 2 = 12, but there are 8 processes"):
        resolve(3, 2, 2, 8, who="S")
    assert (
        resolve(2, 1, 1, 8, context=4, who="S") == resolve("auto", 1, 1, 8, context=4, who="S") == Layout(1, 8, 1, 1, 4)
    )
    with pytest.raises(ValueError, match=r"context_parallel_size=3\): 1 x 1 x 3 = 3 does not divide the 8 processes"):
        resolve("auto", 1, 1, 8, context=3, who="S")
    assert resolve("auto", 2, 1, 8, shard=2, who="S") == Layout(1, 4, 2, copies=2)
    assert resolve("auto", 2, 1, 8, shard=4, who="S") == Layout(1, 4, 2)
    with pytest.raises(ValueError, match=r"shard=3\): groups of 3 ranks do not divide the 4 data-parallel ranks"):
        resolve("auto", 2, 1, 8, shard=3, who="S")


def test_sizes_are_checked_before_anything_is_waited_for() -> None:
    run = trainer(strategy="hybrid_tp2", devices=1, max_steps=1)
    with pytest.raises(ValueError, match=r"2 x 1 = 2 does not divide the 1 processes"):
        run.fit(TinyClassifier(), loader("classifier"))


def test_every_string_is_a_strategy() -> None:
    for shards, tensor, pipeline in itertools.product((1, 2, 4, 8), repeat=3):
        sizes = {"shard": shards, "tp": tensor, "pp": pipeline}
        strategy = StrategyRegistry.get("hybrid" + "".join(f"_{k}{size}" for k, size in sizes.items() if size > 1))
        assert isinstance(strategy, HybridParallelStrategy)
        assert (strategy._tensor_parallel_size, strategy.pipeline_parallel_size) == (tensor, pipeline)
        assert strategy.settings.shard is True if shards == 1 else strategy.settings.shard == shards


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_strings_take_any_sizes_and_misspelt_ones_are_put_right(package: str) -> None:
    lightning = pytest.importorskip(package)

    def strategy(name: str) -> Any:
        return lightning.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, barebones=True).strategy

    for name, sizes in (
        ("hybrid_tp3", (True, 3, 1)),
        ("hybrid_tp4_pp2", (True, 4, 2)),
        ("hybrid_pp12_shard16_tp5", (16, 5, 12)),
        ("HYBRID_TP16", (True, 16, 1)),
    ):
        made = strategy(name)
        assert (made.settings.shard, made._tensor_parallel_size, made.pipeline_parallel_size) == sizes
    for name, right in (
        ("hybird_tp2", "hybrid_tp2"),
        ("hybird_tp3_pp5", "hybrid_tp3_pp5"),
        ("hybrid_tensor3", "hybrid_tp3"),
        ("hybrid_tp_4", "hybrid_tp4"),
        ("hybrid_tp0", "hybrid"),
        ("hybrid_dp2_pp4", "hybrid_pp4"),
        ("ddp_powersdg", "ddp_powersgd"),
        ("deepspeed_one_bit_adam", "deepspeed_onebit_adam"),
    ):
        with pytest.raises(
            ValueError, match=rf"strategy='{name}'\): no .* Did you mean '{right}'\?.*shard, cp, tp and pp"
        ):
            strategy(name)
    for name in ("ddp_spwan", "deepspeed_stage_4", "something"):  # Lightning's own, or nobody's
        with pytest.raises(ValueError, match="You selected an invalid strategy name"):
            strategy(name)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_plain_trainer_names_the_command_for_a_folder_of_pieces(package: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip(package)
    fabric = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}[package]
    run = lightning.Trainer(accelerator="cpu", devices=1, logger=False, barebones=True)
    for name in ("meta.pt", ".metadata"):
        with pytest.raises(IsADirectoryError, match="Is a directory"):
            run.strategy.load_checkpoint(tmp_path)
        (tmp_path / name).touch()
    with pytest.raises(IsADirectoryError, match=rf"python -m {fabric}\.utilities\.consolidate_checkpoint {tmp_path}"):
        run.strategy.load_checkpoint(tmp_path)


class Manual(TinyClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(TinyClassifier):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


def fitting(**kwargs: Any) -> pl.Trainer:
    run = trainer(**kwargs)
    run.state.fn = "fit"  # pyright: ignore[reportAttributeAccessIssue]
    return run


SCALED = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("model", "kwargs", "layout", "message"),
    [
        (Manual(), {}, Layout(1, 2, 1), "automatic_optimization=False"),
        (OwnBackward(), {}, Layout(2, 1, 1), "overrides backward"),
        (TinyClassifier(), {"plugins": [SCALED]}, Layout(1, 2, 1), r"16-mixed.*bf16-mixed"),
        (
            TinyClassifier(),
            {"plugins": [FP8Precision(amax="delayed", base=SCALED)]},
            Layout(2, 1, 1),
            r"amax='delayed'.*amax='dynamic'",
        ),
    ],
)
def test_runs_that_cannot_be_divided(
    model: pl.LightningModule, kwargs: dict[str, Any], layout: Layout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_run(fitting(**kwargs), model, layout, replicated=False, who="S")


@pytest.mark.parametrize(
    "callback",
    [WeightAveraging(), EMAWeightAveraging(), StochasticWeightAveraging(0.1), ModelPruning("l1_unstructured")],
)
def test_callbacks_that_need_whole_parameters_are_refused(callback: pl.Callback) -> None:
    run = fitting(callbacks=[callback])
    with pytest.raises(ValueError, match=rf"got {type(callback).__name__}.*shard=False"):
        check_run(run, TinyClassifier(), Layout(2, 1, 1), replicated=False, who="S")
    check_run(run, TinyClassifier(), Layout(1, 2, 1), replicated=True, who="S")
    check_run(run, TinyClassifier(), Layout(1, 1, 1), replicated=False, who="S")


def test_a_scaler_is_taken_only_where_every_process_holds_all() -> None:
    run, layout = fitting(plugins=[SCALED]), Layout(1, 2, 1)
    check_run(run, TinyClassifier(), layout, replicated=True, who="S")
    with pytest.raises(ValueError, match="16-mixed"):
        check_run(run, TinyClassifier(), layout, replicated=False, who="S")


def test_batch_norm_over_all_processes_is_refused_where_replicas_are_several_processes() -> None:
    run = fitting(strategy="hybrid", devices=1, sync_batchnorm=True)
    with pytest.raises(ValueError, match="sync_batchnorm=True"):
        check_run(run, TinyClassifier(), Layout(2, 2, 1), replicated=False, who="S")


def test_a_search_for_nan_is_refused_where_gradients_are_pieces_of_tensor_parallelism() -> None:
    run = fitting(detect_anomaly=True)
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=2\): got Trainer\(detect_anomaly=True\).*Set detect_anomaly"
    ):
        check_run(run, TinyClassifier(), Layout(1, 1, 2), replicated=False, who="S")
    check_run(run, TinyClassifier(), Layout(1, 2, 1), replicated=False, who="S")


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, others = TinyClassifier(), nn.Linear(2, 2)
    model.configure_optimizers = lambda: torch.optim.SGD(others.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"has parameters of shapes \[\(2, 2\), \(2,\)\]"):
        trainer(strategy="hybrid", devices=1, max_steps=1).fit(model, loader("classifier"))


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2)])
def test_an_optimizer_that_looks_at_all_parameters_together_is_refused(layout: Layout) -> None:
    together = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"got LBFGS.*AdamW"):
        check_optimizers([together], layout, replicated=False, who="S")
    check_optimizers([together], layout, replicated=True, who="S")
    check_optimizers([together], Layout(1, 1, 1), replicated=False, who="S")
    check_optimizers([torch.optim.AdamW([nn.Parameter(torch.ones(2))])], layout, replicated=False, who="S")


def test_an_optimizer_that_cannot_step_pieces_says_so_in_the_first_step() -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    whole, pieces = (nn.Parameter(t) for t in (torch.ones(4, 4), distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])))
    for p in (whole, pieces):
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.Adafactor([pieces])
    with pytest.raises(ValueError, match=r"S: Adafactor cannot step parameters .*AdamW") as raised:
        with steps_pieces(optimizer, lambda: True, who="S"):
            optimizer.step()
    with pytest.raises(RuntimeError, match="sharding of my own"), steps_pieces(optimizer, lambda: False, who="S"):
        raise RuntimeError("sharding of my own")
    with pytest.raises(RuntimeError, match="no bytes left"), steps_pieces(optimizer, lambda: True, who="S"):
        raise RuntimeError("no bytes left")
    optimizer = torch.optim.Adafactor([whole])
    with pytest.raises(RuntimeError, match="placement"), steps_pieces(optimizer, lambda: True, who="S"):
        raise RuntimeError("placement")
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_importing_the_strategy_loads_no_engine() -> None:
    code = (
        "import sys, lightning.pytorch as pl, lightning_eff; before = {m.split('.')[0] for m in sys.modules};"
        "import lightning_eff.strategies.hybrid_parallel;"
        "assert {m.split('.')[0] for m in sys.modules} == before, {m.split('.')[0] for m in sys.modules} - before;"
        "pl.Trainer(strategy='hybrid', devices=1, accelerator='cpu', logger=False);"
        "loaded = [m for m in sys.modules if m.startswith('torch.distributed.checkpoint')];"
        "assert not loaded and 'lightning_eff.strategies._tensor.plan' not in sys.modules, loaded"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_the_context_parallel_script_without_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    context_parallel.main(["--tiny", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["seconds"]["whole"]) == 2 and found["seconds"]["divided"] == []
    assert found["divided"].startswith("not run")
    with pytest.raises(SystemExit):
        context_parallel.main([])
    assert "needs GPUs; got none" in capsys.readouterr().err


def test_the_context_parallel_script_divides_positions_labels_and_loss_rightly() -> None:
    """All but attention, which sees the other parts: without it, pieces add up to the whole."""
    model = context_parallel.Model(vocabulary=64, dim=32, heads=2, layers=2)
    for block in model.blocks:
        torch.nn.init.zeros_(block.get_parameter("out.weight"))
    text = torch.randint(64, (1, 33))
    batch = {"ids": text[:, :-1], "labels": text[:, 1:], "positions": torch.arange(32)[None]}
    whole = context_parallel.step(model, batch, nullcontext(), summed=False)
    seen = [
        p for name, p in model.named_parameters() if not name.endswith("out.weight")
    ]  # whose gradient is attention's
    gradients = [p.grad.clone() for p in seen if p.grad is not None]
    order = torch.tensor([*range(8), *range(24, 32), *range(8, 24)])  # as balanced for causal attention
    parts = [{k: t[:, order].chunk(2, dim=1)[i] for k, t in batch.items()} for i in range(2)]
    model.zero_grad()
    losses = [model.loss(**part, count=32) for part in parts]
    sum(losses, torch.zeros(())).backward()
    assert float(sum(losses).detach()) == pytest.approx(float(whole), rel=1e-6)
    again = [p.grad for p in seen if p.grad is not None]
    for g, h in zip(gradients, again, strict=True):
        torch.testing.assert_close(h, g, rtol=1e-4, atol=1e-6)


def test_rotary_products_depend_on_distances_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16).unbind()
    at = [
        float(
            (context_parallel.rotated(q, torch.tensor([[i]])) * context_parallel.rotated(k, torch.tensor([[j]]))).sum()
        )
        for i, j in ((3, 1), (103, 101), (3, 2))
    ]
    assert at[1] == pytest.approx(at[0], abs=1e-4) and at[2] != pytest.approx(at[0], abs=1e-3)


@pytest.fixture
def mesh() -> DeviceMesh:
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def test_small_blocks_are_divided_with_the_rest(mesh: DeviceMesh) -> None:
    for least, alone in ((0, 3), (21, 2), (111, 1), (10**6, 1)):  # blocks of 20 and 110 parameters, and the root
        blocks = [nn.Linear(4, 4), nn.Linear(10, 10)]
        root = Root(nn.Sequential(*blocks))
        shard(root, blocks, mesh, min_num_params=least)
        assert len(groups(root)) == alone, least
        assert len(sharded_parameters(root)) == 4


def test_optimizers_step_dtensors_by_lists_where_they_are_free_to(mesh: DeviceMesh) -> None:
    """Each step is the plain one's. Plain parameters, and what the user chose, stay as they are; mixed groups use no lists."""
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(n)) for n in (4, 6)]
    spread = [nn.Parameter(DTensor.from_local(p.detach().clone(), mesh, [Shard(0)])) for p in plain]
    for cls, settings, params, expected in (
        (torch.optim.AdamW, {}, spread, True),
        (torch.optim.SGD, {"momentum": 0.9}, spread, True),
        (torch.optim.AdamW, {"foreach": False}, spread, False),
        (torch.optim.Adam, {"differentiable": True}, spread, None),
        (torch.optim.AdamW, {}, plain, None),
        (torch.optim.AdamW, {}, [*spread, *plain], False),
        (torch.optim.NAdam, {}, spread, None),
    ):
        optimizer = cls(params, lr=0.1, **settings)
        with pytest.raises(ArithmeticError), by_lists(optimizer):
            assert optimizer.param_groups[0]["foreach"] is expected, (cls, settings)
            raise ArithmeticError
        assert optimizer.param_groups[0]["foreach"] is settings.get("foreach")
    for params in (plain, spread):
        optimizer = torch.optim.AdamW(params, lr=0.1)
        for step in range(3):
            for p in params:
                p.grad = torch.sin(p.detach() + step)
            with by_lists(optimizer):
                optimizer.step()
    for p, q in zip(plain, spread, strict=True):
        torch.testing.assert_close(q.detach().full_tensor(), p.detach())  # pyright: ignore[reportAttributeAccessIssue]
