"""What every test relies on: one thread, a known seed, and no trace left behind by a test."""

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # what torch asks for before CUDA's products repeat bit for bit

import lightning.pytorch as pl
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from tests import full, processes, selection

if os.environ.get("LIGHTNING_EFF_TEST_ACCELERATOR", "cpu") != "cpu":  # there, some operations add in no fixed order
    torch.use_deterministic_algorithms(True, warn_only=True)

Once = Callable[[str, Callable[[], Any]], Any]
BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--technique", metavar="NAME", help="only the own tests of what is exported under this name")


def pytest_configure(config: pytest.Config) -> None:
    selection.choose(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = selection.chosen(config)
    is_test = collection_path.suffix == ".py" and collection_path.stem.startswith("test_")
    return True if name is not None and is_test and not selection.may_hold(collection_path, name) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--technique NAME``, only its own tests; the slow ones, and those that take long, stay behind their markers."""
    full.mark(items)
    name = selection.chosen(config)
    if name is not None:
        kept = selection.own(items, name)
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected stays to the end, and no collection of garbage need go through it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # extensions that count what they leave would tell of all of it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Notes when the processor began with a test, its fixtures included."""
    item.stash[BEGAN] = processes.processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """What a test took of the processor, its ended processes included, stands in the report of ``--junitxml``."""
    result = yield
    taken = processes.processor_seconds() - item.stash[BEGAN]
    item.user_properties.append(("processor_seconds", f"{taken:.3f}"))
    return result


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """``once(name, run)`` is what ``run()`` gives, as JSON: run by one pytest worker, and read by all that need it."""
    base = tmp_path_factory.getbasetemp()
    return partial(processes.once, base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    """Seed everything; afterwards torch's global switches are as before, and no run of a technique is still open."""
    from lightning_eff._core import session

    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    before = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"))
    yield
    assert (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")) == before
    assert not _get_current_function_mode_stack()
    if torch.distributed.is_initialized():  # Lightning leaves its process group to the end of the process
        torch.distributed.destroy_process_group()
    if session._OPEN:  # a collection takes most of a second
        gc.collect()
    assert not list(session._OPEN), "a test left a session open"
