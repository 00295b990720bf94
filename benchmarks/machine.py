"""What a script's figures were taken on, and where they go."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import lightning
import torch


def described() -> dict[str, Any]:
    """The device, how many threads and cores there are, and versions."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }


def publish(result: dict[str, Any], out: Path | None) -> None:
    """Print ``result`` as JSON, and write it to the file ``out`` where there is one."""
    text = json.dumps(result, indent=2)
    print(f"\n{text}")
    if out is not None:
        out.write_text(f"{text}\n")
