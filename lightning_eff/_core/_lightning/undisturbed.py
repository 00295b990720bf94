"""Build and run Lightning's objects without its messages and without a trace in random state."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

from lightning_eff._core import rng
from lightning_eff._core._lightning.names import NAMES


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Silence Lightning, and restore the random state and the seed in the environment afterwards."""
    loggers = [logging.getLogger(name) for names in NAMES.items() for name in names]
    levels = [logger.level for logger in loggers]
    seeds = {name: os.environ.get(name) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), rng.fork():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, value in seeds.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
