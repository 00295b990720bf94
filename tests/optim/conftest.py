"""What tests of several folders of ``optim`` share."""

from typing import Any

import pytest

from tests.conftest import Once
from tests.optim import optim_jobs


@pytest.fixture(scope="session")
def two_processes(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes found, by the job's name; see :mod:`tests.optim.optim_jobs`."""
    return optim_jobs.two_processes(once, tmp_path_factory.mktemp)
