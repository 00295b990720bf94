"""The recipe of the page on several machines trains on two, each with one process, started by torchrun as it says."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.processes import free_port
from tests.strategies.test_hybrid_failure import environment

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "how" / "several_machines.md").read_text()

SMALL: dict[str, Any] = {
    "trainer": {"accelerator": "cpu", "max_steps": 3, "devices": 1, "limit_val_batches": 0, "logger": False},
    "model": {"init_args": {"dim": 16, "num_layers": 2, "num_heads": 2, "block_size": 32, "num_samples": 0}},
    "data": {"init_args": {"block_size": 32, "batch_size": 4, "max_bytes": 100_000}},
}


def test_two_machines_train_and_share_a_checkpoint(tmp_path: Path) -> None:
    blocks = re.findall(r"^( *)```yaml\n(.*?)^\1```", PAGE, re.MULTILINE | re.DOTALL)
    recipe, plan = (
        textwrap.dedent(body).replace("/shared", str(tmp_path)).replace("steps: 500", "steps: 3") for _, body in blocks
    )
    planned = yaml.safe_load(plan)["trainer"]
    assert (planned["num_nodes"], planned["devices"]) == (2, 8)
    planned["strategy"]["init_args"] |= {
        "data_parallel_size": 2,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "save_distributed_checkpoint": True,
    }
    small = {
        **SMALL,
        "trainer": {**SMALL["trainer"], "strategy": planned["strategy"], "default_root_dir": str(tmp_path)},
    }
    configs: list[str] = []
    for name, text in (("recipe", recipe), ("plan", plan), ("small", yaml.safe_dump(small))):
        (tmp_path / f"{name}.yaml").write_text(text)
        configs += ["--config", str(tmp_path / f"{name}.yaml")]
    port, running = str(free_port()), []
    for node in ("0", "1"):
        torchrun = ["torch.distributed.run", "--nnodes", "2", "--node-rank", node, "--nproc-per-node", "1"]
        where = ["--master-addr", "127.0.0.1", "--master-port", port]
        program = ["--no-python", sys.executable, "-m", "lightning_eff.cli", "fit", *configs]
        command = [sys.executable, "-m", *torchrun, *where, *program]
        running.append(
            subprocess.Popen(
                command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    for process in running:
        printed, _ = process.communicate(timeout=600)
        assert process.returncode == 0, printed[-4000:]
    saved = torch.load(tmp_path / "run1" / "last.ckpt" / "meta.pt")
    assert saved["global_step"] == 3
    assert (tmp_path / "config.yaml").exists(), "and not in the folder that it was started in"
    assert len([*(tmp_path / "run1" / "last.ckpt").glob("__*_0.distcp")]) == 2, "each machine writes its pieces"
