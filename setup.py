"""What pyproject.toml cannot say: all packages that exist, those in kernels/ under the name they are imported by."""

from setuptools import find_packages, setup

kernels = ["lightning_eff.kernels", *(f"lightning_eff.kernels.{name}" for name in find_packages("kernels"))]
setup(packages=[*find_packages(include=["lightning_eff", "lightning_eff.*"]), *kernels])
