"""The machine and the versions, as they stand in each result: no names, no paths. ``python -m benchmarks.gpu.environment``."""

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

PACKAGES = ("torch", "triton", "lightning", "transformers", "torchao", "numpy")


def version(package: str) -> str | None:
    """As installed, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(*, tiny: bool) -> dict[str, Any]:
    """The device that a unit runs on (a CPU with ``tiny``), its driver, and the versions of what computes."""
    import torch

    from benchmarks.memory.show import cpu
    from lightning_eff.monitor.machine import driver

    cuda = torch.cuda.is_available() and not tiny
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else cpu(),
        "driver": driver() if cuda else None,
        "cuda": torch.version.cuda,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if cuda else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "tiny": tiny,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    return found | {package: version(package) for package in PACKAGES} | {"torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    import torch

    print(json.dumps(environment(tiny=args.tiny) | {"has_cuda": torch.cuda.is_available()}))


if __name__ == "__main__":
    main()
