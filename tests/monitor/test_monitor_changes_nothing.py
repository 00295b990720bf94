"""The monitor beside models, techniques and hooks that are easily disturbed: weights bit for bit, and what is really held."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor
from tests.cases import ALL
from tests.models import LENGTH, VOCAB, HuggingFace, TinyGPT, loader, make_batch, module, trainer
from tests.plugins import PLUGINS
from tests.runs import checkpoints, differences, final_state, fit

_TEXT: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "use_cache": False}
_LLAMA: dict[str, Any] = {
    **_TEXT,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}


def mixtral() -> Any:
    config = transformers.MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def lora_qwen3() -> Any:
    peft = pytest.importorskip("peft")
    plain = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_LLAMA, head_dim=16))
    return peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def mamba() -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**_TEXT, state_size=8))


def gemma2() -> Any:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**_LLAMA, head_dim=16))


def watched_or_not(
    build: Callable[[], pl.LightningModule], data: Any, *monitors: pl.Callback, **kwargs: Any
) -> dict[str, Tensor]:
    pl.seed_everything(3, verbose=False)
    net = build()
    t = trainer(*monitors, **{"max_steps": 3, **kwargs})
    t.fit(net, data)
    return final_state(net, t)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers by an old name
@pytest.mark.parametrize("build", [mixtral, lora_qwen3, mamba, gemma2])
def test_hugging_face_models_train_bit_for_bit_the_same(build: Callable[[], Any]) -> None:
    data = [make_batch("llama", seed=i) for i in range(3)]
    plain, watched = (
        watched_or_not(lambda: HuggingFace(build().train()), DataLoader(data, batch_size=None), *monitors)  # pyright: ignore[reportArgumentType]
        for monitors in ([], [EfficiencyMonitor()])
    )
    assert differences(plain, watched) == []


class Steps(pl.LightningModule):
    """A module whose loss is ``fn(net, x)``, on batches of one tensor (4, 8)."""

    def __init__(self, fn: Callable[["Steps", Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.fn(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.1)


def tensors(number: int = 3) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(0)
    return DataLoader([torch.randn(4, 8, generator=g) for _ in range(number)], batch_size=None)  # pyright: ignore[reportArgumentType]


def checkpointed(reentrant: bool) -> Callable[[Steps, Tensor], Tensor]:
    def fn(net: Steps, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=reentrant)  # pyright: ignore[reportAssignmentType]
        return F.dropout(x, 0.2).square().mean()

    return fn


def on_cpu(net: Steps, x: Tensor) -> Tensor:
    with save_on_cpu():
        return net.blocks(x).square().mean()


def functional(net: Steps, x: Tensor) -> Tensor:
    return net.blocks(x + torch.func.grad(lambda y: (y**3).sum())(x)).square().mean()


def teacher(net: Steps, x: Tensor) -> Tensor:
    with torch.inference_mode():
        target = F.softmax(net.blocks(x), dim=-1)
    return F.mse_loss(net.blocks(x), target.clone())


DISTURBED: dict[str, Callable[[Steps, Tensor], Tensor]] = {
    "prod": lambda net, x: net.blocks(x).prod(1).mean(),  # takes another way where a dispatch mode is active
    "mish": lambda net, x: F.mish(net.blocks(x)).mean(),
    "checkpoint": checkpointed(False),
    "reentrant": checkpointed(True),
    "save_on_cpu": on_cpu,
    "torch.func": functional,
    "inference_mode": teacher,
}


@pytest.mark.parametrize("name", DISTURBED)
def test_steps_that_are_easily_disturbed(name: str) -> None:
    seen = EfficiencyMonitor()
    plain, watched = (watched_or_not(lambda: Steps(DISTURBED[name]), tensors(), *monitors) for monitors in ([], [seen]))
    assert differences(plain, watched) == []
    assert seen.summary()["flops"] > 0 and seen.summary()["memory"]["activations"] > 0


def test_compiled_functions_run_compiled_in_counted_steps() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lambda *args: [x + 1e-3 for x in graph.forward(*args)]  # not what it computes uncompiled

    def run(*monitors: pl.Callback) -> dict[str, Tensor]:
        torch._dynamo.reset()
        double = torch.compile(lambda x: x * 2, backend=backend)
        return watched_or_not(lambda: Steps(lambda net, x: net.blocks(double(x)).mean()), tensors(), *monitors)

    assert differences(run(), run(EfficiencyMonitor())) == []
    assert len(graphs) == 2


def test_what_would_fail_without_it_fails_with_it() -> None:
    """Hooks for saved tensors switch autograd's check for changes in place off."""

    def changed(net: Steps, x: Tensor) -> Tensor:
        y = net.blocks(x).sigmoid()
        loss = y.square().mean() + y.sin().mean()
        with torch.no_grad():
            y.zero_()
        return loss

    for monitors in ([], [EfficiencyMonitor()]):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            watched_or_not(lambda: Steps(changed), tensors(), *monitors)


# -- techniques and plugins


@pytest.mark.slow  # in ordinary runs the pairs hold it, where a monitor stands beside each stack
@pytest.mark.parametrize("name", sorted(ALL))
def test_techniques_train_and_resume_bit_for_bit_the_same(name: str, tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [ALL[name].active()]

    watched: dict[str, Any] = {"callbacks": [EfficiencyMonitor()]}
    whole = final_state(*fit(ALL[name].model, build, directory=tmp_path))
    assert differences(whole, final_state(*fit(ALL[name].model, build, **watched))) == []
    path = checkpoints(tmp_path)[4]
    assert differences(whole, final_state(*fit(ALL[name].model, build, resume=path, **watched))) == []


@pytest.mark.parametrize(
    ("name", "precision"), [(name, p) for name in sorted(PLUGINS) for p in PLUGINS[name].precisions]
)
def test_plugins_train_bit_for_bit_the_same(name: str, precision: Any) -> None:
    plain, watched = (
        final_state(*fit("tiny_gpt", list, plugins=[PLUGINS[name].build(precision)], callbacks=monitors, max_steps=4))
        for monitors in ([], [EfficiencyMonitor()])
    )
    assert differences(plain, watched) == []


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers 5 has a new name for it, version 4 has not
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_transformers(reentrant: bool) -> None:
    def build() -> pl.LightningModule:
        net: Any = module("gpt2", dropout=0.1)
        net.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return net

    seen = EfficiencyMonitor()
    plain, watched = (watched_or_not(build, loader("gpt2"), *monitors) for monitors in ([], [seen]))
    assert differences(plain, watched) == []
    stored = EfficiencyMonitor()
    watched_or_not(lambda: module("gpt2", dropout=0.1), loader("gpt2"), stored)
    told, without = seen.summary(), stored.summary()
    assert told["flops"] == without["flops"] and told["extra_flops"] > 0 == without["extra_flops"]
    inputs = 4 * 4 * LENGTH * 32 * 4  # of four blocks (4, 32, 32) in float32
    assert inputs < told["memory"]["activations"] < without["memory"]["activations"] / 4


# -- what is held


def held(*callbacks: Any, plugins: Any = None) -> int:
    seen = EfficiencyMonitor()
    more = {} if plugins is None else {"plugins": plugins}
    trainer(*callbacks, seen, max_steps=2, **more).fit(TinyGPT(dropout=0.0), loader("tiny_gpt"))
    return seen.summary()["memory"]["activations"]


def test_activations_are_the_bytes_that_compression_holds() -> None:
    technique = eff.ActivationCompression(bits=2)
    assert held(technique) == technique.report()["saved_bytes"]
    assert held() == technique.report()["exact_bytes"]
    plugin = eff.ACTPrecision(bits=2)
    assert held(plugins=[plugin]) == technique.report()["saved_bytes"]


def test_activations_are_the_bytes_that_other_techniques_hold() -> None:
    whole = held()
    offload = eff.ActivationOffload(min_bytes=1024)
    on_host = held(offload)  # here the host's memory is the device's, in buffers of whole pages
    assert offload.report()["bytes_held"] <= on_host < whole + offload.report()["bytes_held"] * 0.2
    full = eff.Rematerialization(policy="full")
    assert full.report()["input_bytes"] == 0
    kept = held(full)
    assert full.report()["input_bytes"] < kept < whole / 4
    selective = held(eff.Rematerialization(policy="selective"))
    assert kept < selective < whole


# -- torch's own record


@pytest.mark.parametrize("repeat", [0, 1])
def test_profilers_of_the_users_go_on_beside_it(repeat: int) -> None:
    """Also one that waits and warms up, which a second profiler would crash."""
    seen = EfficiencyMonitor()
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=repeat)

    class Turn(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            record.step()

    with torch.profiler.profile(schedule=schedule, acc_events=True) as record:
        trainer(seen, Turn(), max_steps=6).fit(Steps(DISTURBED["mish"]), tensors(6))
    assert seen.summary()["flops"] > 0 and seen.summary()["flops_batches"] == 5
    if repeat:
        assert any(event.name == "aten::addmm" for event in record.events())


def test_a_record_of_the_users_goes_before(tmp_path: Path) -> None:
    seen, record = EfficiencyMonitor(), torch.profiler.ExecutionTraceObserver()
    record.register_callback(str(tmp_path / "trace.json"))
    record.start()
    trainer(seen, max_steps=3).fit(Steps(DISTURBED["mish"]), tensors())
    record.stop()
    record.unregister_callback()
    assert "aten::addmm" in (tmp_path / "trace.json").read_text()
    assert seen.summary()["counted_batches"] == 0 and seen.summary()["flops_per_second"] is None
    assert "not counted: another ExecutionTraceObserver of torch is in use" in seen.text()


def test_nothing_is_printed_in_a_step(capfd: pytest.CaptureFixture[str]) -> None:
    t = trainer(max_steps=2)
    t.fit(Steps(DISTURBED["mish"]), tensors())
    capfd.readouterr()
    t = trainer(EfficiencyMonitor(), max_steps=2)
    t.fit(Steps(DISTURBED["mish"]), tensors())
    assert ".cpp:" not in capfd.readouterr().err
