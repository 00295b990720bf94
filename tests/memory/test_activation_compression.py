"""The callback of compressed activations: what it acts on, what it refuses, and bits by measured sensitivity."""

import argparse
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_eff import ProgressiveLayerDropping
from lightning_eff.memory._compression.bits import Allocation
from lightning_eff.memory._compression.engine import Engine
from lightning_eff.memory._compression.ranges import RunningRanges
from lightning_eff.memory._hosting.host import HostStore
from lightning_eff.memory.act_precision import ACTPrecision
from lightning_eff.memory.activation_compression import ActivationCompression
from tests.cases import Case, classifier
from tests.models import HuggingFace, TinyGPT, flat, hugging_face, loader, make_batch, trainer
from tests.runs import differences, final_state, fit, largest, resume_from_every_step

CASES = {
    "ActivationCompression": Case(
        active=lambda: ActivationCompression(bits=2),
        neutral=lambda: ActivationCompression(bits=32),
        lossy=True,
        lost=(classifier, "classifier", "none of the [0-9,]+ bytes that the first step saves could be compressed"),
    )
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 3}, "bits=3.*expected 2, 4, 8, 32 or 'auto'"),
        ({"bits": True}, "bits=True"),
        ({"bits": "many"}, "bits='many'"),
        ({"method": "mse"}, "method='mse'.*'group'.*'mesa'"),
        ({"method": "mesa"}, "bits=4, method='mesa'.*bits=8"),
        ({"method": "mesa", "bits": "auto"}, "bits='auto', method='mesa'.*bits=8"),
        ({"group_size": 100}, "group_size=100.*power of two"),
        ({"group_size": 8}, r"group_size=8.*in \[16, 8192\]"),
        ({"budget": 3.0}, "budget=3.0.*bits='auto'"),
        ({"bits": "auto", "budget": 0.5}, r"budget=0.5.*in \[1, 8\]"),
        ({"bits": "auto", "interval": 0}, "interval=0.*>= 1"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationCompression(**arguments)


def test_refusals() -> None:
    net = TinyGPT()
    net.blocks[1]._compiled_call_impl = net.blocks[1].forward  # as nn.Module.compile leaves it
    with pytest.raises(ValueError, match=r"'blocks.1' is compiled, so .*activation_memory_budget"):
        trainer(ActivationCompression(), max_steps=1).fit(net, loader("tiny_gpt"))
    with pytest.raises(ValueError, match="ACTPrecision cannot train together with it: it compresses activations too"):
        trainer(ActivationCompression(), plugins=[ACTPrecision()], max_steps=1).fit(TinyGPT(), loader("tiny_gpt"))
    with pytest.raises(ValueError, match=r"layers='head'.*Candidates"):
        trainer(ActivationCompression(layers="head"), max_steps=1).fit(TinyGPT(), loader("tiny_gpt"))
    manual = TinyGPT()
    manual.automatic_optimization = False
    with pytest.raises(ValueError, match=r"automatic_optimization=False.*Set a number of bits"):
        trainer(ActivationCompression(bits="auto"), max_steps=1).fit(manual, loader("tiny_gpt"))


class _Keeps(TinyGPT):
    """Keeps its first gradient and batch; no dropout."""

    def __init__(self) -> None:
        super().__init__(num_layers=2, dropout=0.0)
        self.kept: list[Any] = []

    def on_after_backward(self) -> None:
        self.kept.append([p.grad.clone() for p in self.parameters() if p.grad is not None])


def test_gradients_are_those_of_the_engine() -> None:
    torch.manual_seed(0)
    net = _Keeps()
    start = flat(net).clone()
    technique = ActivationCompression(bits=2)
    seeds: list[int] = []
    real = technique._seed
    technique._seed = lambda *args: seeds.append(real(*args)) or seeds[-1]  # type: ignore[method-assign]
    data = loader("tiny_gpt", shuffle=False)
    trainer(technique, max_steps=1).fit(net, data)
    torch.nn.utils.vector_to_parameters(start, net.parameters())
    net.log, batch = (lambda *args, **kwargs: None), next(iter(data))
    engine = Engine(net, bits=2)
    net.zero_grad()
    with engine.forward(seeds[0], batch):
        loss = net.training_step(batch, 0)
    loss.backward()
    assert len(seeds) == 1
    assert all(torch.equal(g, p.grad) for g, p in zip(net.kept[0], net.parameters(), strict=True))


def test_layers_says_whose_tensors_are_compressed() -> None:
    """What lies behind the blocks keeps its exact gradient; what lies in them does not."""

    def run(*techniques: ActivationCompression) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = _Keeps()
        trainer(*techniques, max_steps=1).fit(net, loader("tiny_gpt", shuffle=False))
        return dict(zip([name for name, _ in net.named_parameters()], net.kept[0], strict=True))

    plain, everywhere = run(), run(ActivationCompression(bits=2))
    technique = ActivationCompression(bits=2, layers="blocks")
    blocks = run(technique)
    assert torch.equal(blocks["head.weight"], plain["head.weight"])
    assert not torch.equal(everywhere["head.weight"], plain["head.weight"])
    assert not torch.equal(blocks["blocks.1.mlp.2.weight"], plain["blocks.1.mlp.2.weight"])
    assert technique.report()["linear_bytes"] > 0


def test_reports_bytes_and_says_so() -> None:
    technique = ActivationCompression(bits=4)
    fit("tiny_gpt", lambda: [technique], max_steps=2)
    report = technique.report()
    parts = sum(value for name, value in report.items() if name.endswith("_bytes") and name != "exact_bytes")
    assert parts - report["saved_bytes"] == report["saved_bytes"] > 0
    assert report["ratio"] == report["exact_bytes"] / report["saved_bytes"] > 4
    assert 4 <= report["bits"] < 5 and report["unfit"] == 0
    assert "times less" in technique.summary()


def test_rounding_differs_from_step_to_step_and_resumes(tmp_path: Path) -> None:
    """Seeds follow from the step, so an uninterrupted and a resumed run round alike; other bits train otherwise."""
    build = lambda: [ActivationCompression(bits=2)]  # noqa: E731
    assert resume_from_every_step("tiny_gpt", build, tmp_path) == {}


def test_dropped_blocks_are_not_saved() -> None:
    technique = ActivationCompression(bits="auto", interval=4)
    net, t = fit("tiny_gpt", lambda: [technique, ProgressiveLayerDropping(theta_min=0.3, gamma=20.0)])
    assert t.global_step == 12 and flat(net).isfinite().all()
    assert len({key.split(":")[0] for key in technique.state_dict()["allocation"]["numel"]}) > 4


# -- ActNN's levels, and codes in host memory


class _Convolutions(nn.Sequential):
    def __init__(self) -> None:
        conv = (nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3))
        super().__init__(*conv, nn.Flatten(), nn.Linear(8 * 12 * 12, 4))


def test_levels() -> None:
    made = {name: ActivationCompression.level(name) for name in ("L0", "L1", "L2", "L3", "L4")}  # type: ignore[arg-type]
    assert [made[name].bits for name in made] == [32, 4, 4, "auto", "auto"]
    assert [made[name].budget for name in made] == [None, None, None, 2.0, 2.0]
    assert [made[name].convolutions_only for name in made] == [False, True, False, False, False]
    assert [made[name].offload for name in made] == [False, False, False, False, True]
    assert [made[name].neutral for name in made] == [True, False, False, False, False]
    with pytest.raises(ValueError, match=r"level\('L5'\): expected one of L0, L1, L2, L3, L4"):
        ActivationCompression.level("L5")  # type: ignore[arg-type]


def test_convolutions_only() -> None:
    """A convolution's saved input in 4 bits, all else as it is, and the gradient of all else exact."""
    net, x = _Convolutions(), torch.randn(8, 1, 16, 16)
    technique = ActivationCompression.level("L1")
    engine = technique._engine = Engine(net, bits=4, only=technique._is_asked)
    gradients: list[dict[str, Tensor]] = []
    for compressed in (False, True):
        net.zero_grad()
        if compressed:
            with engine.forward(0, (x,)):
                loss = net(x).square().sum()
        else:
            loss = net(x).square().sum()
        loss.backward()
        gradients.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    held = {category: size for category, size in engine.ledger.by_category.items() if size}
    input_of_second = 8 * 8 * 14 * 14
    assert held.pop("linear") == input_of_second // 2 + 8 * input_of_second // 256
    assert set(held) <= {"other", "statistic", "small"} and engine.ledger.unfit == 0
    changed = {name for name in gradients[0] if not torch.equal(gradients[0][name], gradients[1][name])}
    assert changed == {"3.weight"}


def test_offload_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"offload=True.*on the CPU.*Remove offload=True"):
        trainer(ActivationCompression(offload=True), max_steps=1).fit(TinyGPT(), loader("tiny_gpt"))


@pytest.mark.filterwarnings("ignore:.*activations are in host memory already")
@pytest.mark.parametrize("mesa", [False, True])
def test_codes_in_host_memory_are_the_same_codes(mesa: bool) -> None:
    """Here the host's memory is the device's too; what is held where, and what comes back, is as on a GPU."""
    net, batch = hugging_face("gpt2", num_layers=2), make_batch("gpt2", 16)
    found: list[Tensor] = []
    ledgers = []
    store = HostStore()
    for host in (None, store):
        net.zero_grad()
        engine = Engine(net, bits=8, ranges=RunningRanges() if mesa else None, host=host)
        with engine.forward(3, batch):
            loss = net.training_step(batch, 0)
        assert host is None or host.bytes_on_host == engine.ledger.host_bytes > 0
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        ledgers.append(engine.ledger)
    assert torch.equal(*found)
    here, there = ledgers
    assert there.saved_bytes + there.host_bytes == here.saved_bytes and here.host_bytes == 0
    assert there.exact_bytes == here.exact_bytes and there.bits == here.bits
    assert store.bytes_on_host == 0


# -- bits="auto"


def test_auto_resumes_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    build = lambda: [ActivationCompression(bits="auto", interval=5)]  # noqa: E731
    assert resume_from_every_step("tiny_gpt", build, tmp_path, accumulate_grad_batches=2) == {}
    plain = final_state(*fit("tiny_gpt", list))
    measured = final_state(*fit("tiny_gpt", build))
    assert "rng" not in differences(plain, measured) and differences(plain, measured)


def test_auto_measures_on_a_schedule_and_counts_what_that_costs() -> None:
    """One pass and one for each kind that is no linear map's input: GELU, two norms, and attention's q, k, v."""
    technique = ActivationCompression(bits="auto", interval=10)
    due: list[int] = []
    real = technique._measure
    technique._measure = lambda step, *args: (due.append(step.global_step), real(step, *args))  # type: ignore[method-assign]
    bits: list[float] = []
    gradient = technique._gradient

    def noting(engine: Engine, *args: Any) -> Any:
        found = gradient(engine, *args)
        bits.append(engine.ledger.bits)
        return found

    technique._gradient = noting  # type: ignore[method-assign]
    fit("tiny_gpt", lambda: [technique], accumulate_grad_batches=2)
    assert due == [0, 1, 3, 10]
    passes = len(bits) // 4
    for i, mean in enumerate(bits):  # all is measured beside tensors of 8 bits, whatever these have in training
        assert mean == bits[0] if i % passes == 0 else bits[0] / 2 < mean < bits[0], (i, len(bits), str(bits))
    past = technique._past
    assert past is not None
    in_blocks, outside = 6, 1
    assert past.chain.cost.forward_passes == past.chain.cost.backward_passes == 4 * (1 + in_blocks + outside)


class _Text(DataLoader):
    """Windows of 64 bytes of a program's text, 8 at a time."""

    def __init__(self, batches: int, seed: int) -> None:
        data = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
        starts = torch.randint(0, len(data) - 64, (8 * batches,), generator=torch.Generator().manual_seed(seed))
        windows = [data[s : s + 64].clamp_max(127) for s in starts.tolist()]
        super().__init__([{"input_ids": w, "labels": w} for w in windows], batch_size=8)  # type: ignore[arg-type]


def test_auto_at_three_bits_is_nearer_than_uniform_four() -> None:
    """After 40 steps of a GPT-2 on text, on a batch that was never seen."""
    sizes = {"n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 128, "use_cache": False}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    net = HuggingFace(GPT2LMHeadModel(GPT2Config(**sizes, **drop)).train())
    technique = ActivationCompression(bits="auto", interval=30)
    trainer(technique, max_steps=40).fit(net, _Text(40, 0))
    batch = next(iter(_Text(1, 99)))

    def gradient(engine: Engine | None, seed: int = 0) -> Tensor:
        net.zero_grad()
        if engine is None:
            loss = net.training_step(batch, 0)
        else:
            with engine.forward(seed, batch):
                loss = net.training_step(batch, 0)
        loss.backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    net.train()
    exact = gradient(None)
    auto, four = Engine(net, bits=4), Engine(net, bits=4)
    allocation = Allocation(3.0, auto.tensors.family)
    allocation.load_state_dict(technique.state_dict()["allocation"])
    auto.bits = allocation
    errors = {
        name: largest(float((gradient(engine, seed) - exact).norm() / exact.norm()) for seed in range(2))
        for name, engine in (("auto", auto), ("four", four))
    }
    assert auto.ledger.bits <= 3.0 + 1e-6  # "four" has 2.88 on average here: what follows from others counts with none
    assert errors["auto"] < 0.95 * errors["four"], errors
    assert auto.ledger.saved_bytes < 1.05 * four.ledger.saved_bytes


# -- DDP


def _ranks_gradient(rank: int, port: int, directory: str) -> None:
    """A process of two: the gradient that DDP gives it, and its own without DDP, on its own half of the batch."""
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(address)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net, batch = hugging_face("gpt2", num_layers=2), make_batch("gpt2", 4, seed=rank)
    found: dict[str, Tensor] = {}
    for name, run in (("local", net.model), ("ddp", nn.parallel.DistributedDataParallel(net.model))):
        net.zero_grad()
        with Engine(net, bits=2).forward(rank, batch):
            loss = run(**batch).loss
        loss.backward()
        found[name] = torch.cat([p.grad.flatten() for p in net.parameters()])
    torch.save(found, Path(directory, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ddp_averages_the_ranks_compressed_gradients(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    start_processes(_ranks_gradient, (port, str(tmp_path)), nprocs=2, start_method="spawn")
    a, b = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert torch.equal(a["ddp"], b["ddp"])
    assert torch.allclose(a["ddp"], (a["local"] + b["local"]) / 2, atol=1e-7)
    assert float(F.cosine_similarity(a["local"], b["local"], dim=0)) < 0.999
