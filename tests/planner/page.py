"""Writes docs/planner.md from what the planner predicts of published runs: ``python -m tests.planner.page``."""

import json
from dataclasses import fields
from functools import cache
from pathlib import Path

from lightning_eff.planner.accelerators import ACCELERATORS, find_accelerator
from lightning_eff.planner.costs import Assumptions
from lightning_eff.planner.evaluator import Candidate, Evaluator
from lightning_eff.planner.layouts import Layout
from lightning_eff.planner.profiling import ModuleProfile, precision_of
from tests.planner.models import GPT, Llama, deep
from tests.planner.published import LAYER_MILLISECONDS, MEGATRON, TITAN, Run, Titan

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "planner.md"
RESULTS = ROOT / "benchmarks" / "results" / "plan_memory.json"
_PARTS = ("weights", "gradients", "optimizer", "activations", "total")


@cache
def gpt(width: int, layers: int, heads: int) -> ModuleProfile:
    """A GPT of Megatron-LM's, in 16-bit mixed precision."""
    return deep(GPT, layers, 2048, precision_of("bf16-mixed"), width, heads)


@cache
def megatron(width: int, layers: int, heads: int) -> Evaluator:
    """Fused kernels and no sequence parallelism, as Megatron-LM had it in 2021."""
    assumptions = Assumptions(fused=True, pack=False, sequence_parallel=False)
    return Evaluator(gpt(width, layers, heads), find_accelerator("a100-80"), assumptions)


def layer_milliseconds(remat: str) -> float:
    """Forward and backward pass of one layer of the 22B model on 8 A100, micro-batch 4."""
    cost = megatron(6144, 48, 64).costs.part(0, 8, 4, remat, block=True)
    return 1e3 * (cost.forward + cost.backward_input + cost.backward_weight)


@cache
def megatron_run(run: Run) -> Candidate:
    """The run as it was laid out."""
    dp = run.gpus // run.tp // run.pp
    schedule = "Interleaved1F1B" if run.pp > 1 else "none"
    m = run.batch // dp // run.micro_batch
    layout = Layout(dp, run.tp, run.pp, "none", schedule, run.chunks, run.micro_batch, m, "full")
    return megatron(run.width, run.layers, run.heads).run(layout)[0]


def teraflops(run: Run) -> float:
    """TFLOP/s a GPU, by the paper's own count of FLOPs."""
    return run.flops / run.gpus / megatron_run(run).seconds / 1e12


@cache
def titan(run: Titan) -> tuple[float, Candidate]:
    """Tokens/s a GPU, and all that is predicted."""
    profile = deep(Llama, run.layers, 8192, precision_of("bf16-mixed", fp8=run.fp8), run.width, run.inner, run.heads)
    found = Evaluator(profile, find_accelerator("h100-96"), Assumptions(fused=True, pack=False)).run(run.layout)[0]
    samples = run.layout.dp * run.layout.micro_batch * run.layout.num_microbatches
    return samples * 8192 / run.layout.gpus / found.seconds, found


def page() -> str:
    """The whole text."""
    rows = []
    for run in MEGATRON:
        got = teraflops(run)
        at = f"{run.gpus // run.tp // run.pp} x {run.tp} x {run.pp}"
        rows.append(
            (f"{run.billions:g}B", f"{run.gpus}", at, f"{run.teraflops:g}", f"{got:.0f}", _error(got, run.teraflops))
        )
    one = _table(("GPT", "A100", "dp x tp x pp", "TFLOP/s a GPU", "predicted", "error"), rows)
    rows = []
    for run in TITAN:
        got, found = titan(run)
        memory = found.memory.total / 2**30
        published = "-" if run.gibibytes is None else f"{run.gibibytes:g}"
        speed = (f"{run.tokens_per_second:g}", f"{got:.0f}", _error(got, run.tokens_per_second))
        held = (published, f"{memory:.1f}", "-" if run.gibibytes is None else _error(memory, run.gibibytes))
        rows.append((run.name, f"{run.layout.gpus}", *speed, *held))
    two = _table(("Llama 3.1", "H100", "tokens/s a GPU", "predicted", "error", "GiB", "predicted", "error"), rows)
    table = _table(
        ("--gpu", "GB", "BF16 peak, reached", "FP8 peak, reached", "memory", "node", "network", "source"),
        [
            (
                a.name,
                f"{a.memory_bytes / 1e9:.0f}",
                f"{a.peak_flops / 1e12:.0f}, {a.matmul_flops / 1e12:.1f}",
                "-"
                if not a.fp8_peak_flops
                else f"{a.fp8_peak_flops / 1e12:.0f}, {(a.fp8_matmul_flops or 0) / 1e12:.1f}",
                f"{a.memory_bandwidth / 1e9:.0f}",
                f"{a.node_bandwidth / 1e9:.0f}",
                f"{a.network_bandwidth / 1e9:.0f}",
                a.source,
            )
            for a in ACCELERATORS.values()
        ],
    )
    layer = ", ".join(
        f"{milliseconds:g} ms ({remat}) predicted as {layer_milliseconds(remat):.1f}"
        for remat, milliseconds in LAYER_MILLISECONDS.items()
    )
    assumed = _table(("assumption", "default"), [(f"`{f.name}`", str(f.default)) for f in fields(Assumptions)])
    largest = max(MEGATRON, key=lambda run: run.billions)
    trillion = f"{megatron_run(largest).memory.total / 1e9:.0f}"
    return _TEXT.format(
        measured=measured(), trillion=trillion, megatron=one, titan=two, table=table, layer=layer, assumed=assumed
    )


def measured() -> str:
    """Of the plans that were run: predicted and measured megabytes of the fullest rank of each stage."""
    rows: list[tuple[str, ...]] = []
    for found in json.loads(RESULTS.read_text())["plans"]:
        trainer, seen = found["config"]["trainer"], set[int]()
        at = trainer["strategy"]["init_args"]
        shard = {True: "sharded", False: "whole"}.get(at["shard"], f"groups of {at['shard']}")
        what = (
            f"dp {at['data_parallel_size']} {shard}, tp {at['tensor_parallel_size']}, pp {at['pipeline_parallel_size']}"
        )
        what += f" {at['schedule']}" if at["pipeline_parallel_size"] > 1 else ""
        what += "".join(f", remat {c['init_args']['policy']}" for c in trainer["callbacks"] or [])
        for row in sorted(found["ranks"], key=lambda r: (r["pipeline_rank"], -r["measured"]["total"])):
            if row["pipeline_rank"] not in seen:
                seen.add(row["pipeline_rank"])
                predicted, had = row["predicted"], row["measured"]
                pairs = [(predicted[name], had[name]) for name in _PARTS]
                cells = [f"{a / 1e6:.2f} of {b / 1e6:.2f}" for a, b in pairs]
                rows.append((what, str(row["pipeline_rank"]), *cells, _error(*pairs[-1])))
    return _table(("plan", "stage's rank", *_PARTS, "error"), rows)


def _error(got: float, published: float) -> str:
    return f"{(got / published - 1) * 100:+.0f} %"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, tuple("-" * w for w in widths), *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in lines
    )


_TEXT = """\
# The planner

`lightning-eff plan` finds the fastest layouts for your module on many GPUs. It needs no GPU and no memory for the weights:

```bash
lightning-eff plan --config recipe.yaml --gpus 512 --gpu h200
```

It prints the ten fastest layouts, shows where the time and memory of the first one go, and explains why the others are
slower. Layouts with the same predicted time share a row, which shows the one with the least memory. `--timeline` draws a
step. `--json` prints everything. `--out plan.yaml` writes the first layout as a config: strategy, techniques, precision,
processes, accumulation and batch size. Pass it after your recipe, which keeps its own callbacks:

```bash
lightning-eff fit --config recipe.yaml --config plan.yaml
```

## How it works

1. **Profile.** The planner builds the module and runs `training_step` on fake tensors, which have shapes but no data, at two
   batch sizes. It records FLOPs, bytes moved and bytes kept for each block. Use `--profile real` if the step reads values.
2. **Layouts.** The planner combines data, tensor and pipeline parallelism in `HybridParallelStrategy` with every schedule of
   `torch.distributed.pipelining`. It adds `Rematerialization`, `ActivationCompression`, `OptimizerOffload` and `FP8Precision`
   where they apply. It skips combinations that raise an error at setup. `--without`, `--only` and `--exact` narrow the
   search.
3. **Memory.** It adds up weights, gathered weights, gradients, optimizer state, activations and buffers of each rank.
4. **Time.** It simulates the layouts that fit, operation by operation. A lower bound for each layout decides when to stop, so
   the ten layouts are the ten fastest under this model.

## Limits

- The planner does not search `sequence_parallel=True` or the ZeRO stages of `DeepSpeedEffStrategy`.
- It does not search rematerialization under schedules that split the backward pass, `"sqrt"` in a pipeline, or `"optimal"`
  with sharded parameters.
- Setup checks the pipeline cut and the tensor-parallel plan on a real batch. The planner cannot know the result.
- If a module has no tensor-parallel plan, the planner assumes whole activations on every rank. If setup then reports pairs in
  attention and MLP, plan again with `--assume-pairs`.
- If the config has no known argument for the batch size, the planner keeps the batch.
- **Small modules are far slower than predicted**, because kernel launches are free in this model.

## Assumptions

{assumed}

`--assume name=value` changes an assumption. `Assumptions` in `lightning_eff/planner/costs.py` names the source of each.
`efficiency` is the fraction of the best measured rate that matrix products reach. It comes from one layer of a 22B GPT on 8
A100 (Korthikanti et al. 2022, table 4: {layer}). It is not fitted to the runs below. The model also assumes:

- Matrix products, other kernels and tensor-parallel communication run one after the other.
- Sends between stages overlap with computation. Without a pipeline, data-parallel communication overlaps too, except for one
  block. In a pipeline it follows the last backward pass, as in torch.
- Tensor-parallel blocks exchange the hidden state twice per pass. Hidden states, logits and the loss are whole on every rank.
- Weights are gathered in their own type. Autocast copies and receive buffers are counted as torch makes them. `pack=False`
  counts them as Megatron-LM and torchtitan do.
- Compression, FP8 casts and offloading cost the bytes that they move.
- FP32 products run as TF32, at half the BF16 rate. Causal attention counts in full, as in torch's FLOP counter.
- Kernels run in eager mode. With `--fused`, everything between two products is one kernel, which is close to what a compiler
  does.

## Accuracy

Schedules run the same operations in the same order as torch's own, and their bubbles match the papers' formulas
(`tests/planner/test_schedules.py`). The tables compare published runs with predictions (`--fused`, `pack=False`).

{megatron}

Source: Narayanan et al. 2021 (arXiv:2104.04473), tables 1 and 2, with full rematerialization and interleaving. The number of
chunks is not published, so the smallest possible one is used. **Error: 6 % across nodes with a pipeline (39B to 1T), 20 % for
the smaller runs**, which are all predicted too fast. The paper gives no memory. The 1T run fitted into 80 GB, while the
planner needs {trillion} GB, because torch keeps the outputs of stages and Megatron-LM frees them.

{titan}

Source: torchtitan, llama3_h100_202412_torchtitan.md (Liang et al. 2024, arXiv:2410.06511) and, for 70B in BF16,
asyncTP_llama3_h100_2025-06_torchtitan.md, with 8,192 tokens and `torch.compile`. **Error: 15 % in speed and 20 % in memory
for 405B, 45 % for the others.** These H100 were limited to 500 W and the table assumes 700 W, so all are predicted too fast.
Their memory includes fragments that the allocator reserved. Interleaving made the 405B run 1.28 times as fast; the prediction
agrees within 5 %.

### Measured memory

Three plans of the GPT example (8 blocks of width 128, 128 tokens, bf16-mixed) ran on 8 CPU processes. `python -m
benchmarks.plan_memory` counts the bytes of all live tensors in the third step on every rank. The table shows predicted and
measured MB of the fullest rank of each stage. Other ranks of a stage differ by at most 3 %.

{measured}

**Error: from 3 % below to 21 % above, and 9 % below at width 64 (`tests/planner/test_run.py`).** Predictions are deliberately
high for three parts: activations under tensor parallelism without a plan, recomputed blocks, and blocks that a GPU
prefetches. These runs do not show the memory of a caching allocator, NCCL or kernel workspaces (`usable_memory`). They do not
cover GPUs, `ActivationCompression`, `"optimal"`, FP8 or `OptimizerOffload`.

## Accelerators

Memory in GB. Peak and reached rates in dense TFLOP/s. Bandwidth in GB/s: memory, one GPU's link within a node, and its link
to other nodes, in one direction. A node has 8 GPUs.

{table}
"""

if __name__ == "__main__":
    PAGE.write_text(page())
