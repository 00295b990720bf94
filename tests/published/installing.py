"""Install published packages beside the tested versions, and tell which are not there."""

import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.published.package import Package

CONSTRAINTS = Path(__file__).parent.parent.parent / "constraints.txt"
# The index's builds of these are for a CUDA build of torch, and a CPU build cannot load them: `import lightning` then fails.
UNWANTED = ("torchvision", "torchaudio", "timm")


def command(package: Package) -> str:
    """How a user installs it, for the page."""
    return " ".join(["pip install", *package.flags, *(package.requirements or (package.distribution,))])


def missing(package: Package) -> str:
    """Why the package cannot be tried here; empty where it can."""
    try:
        importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return "The package is not installed."
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import {package.imported}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else f"import {package.imported} fails: {done.stderr.strip().splitlines()[-1]}"


def _pip(*args: str) -> int:
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *args], check=False)
    return done.returncode


def install(packages: Iterable[Package]) -> None:
    """Install each, and take out what keeps Lightning from being imported."""
    failed = []
    for package in packages:
        wanted = package.requirements or (package.distribution,)
        # several may be needed with other flags: what a package needs itself comes first, and it without its requirements
        groups = [((), wanted[:-1]), (package.flags, wanted[-1:])] if package.flags else [((), wanted)]
        for flags, group in groups:
            if group and _pip("install", "--quiet", "-c", str(CONSTRAINTS), *flags, *group):
                failed.append(f"{package.distribution}: {command(package)}")
    _pip("uninstall", "--quiet", "--yes", *UNWANTED)
    for line in failed:
        print(f"NOT INSTALLED: {line}")
