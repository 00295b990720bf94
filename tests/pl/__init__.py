"""The tests' own modules, runs and data, written with ``pytorch_lightning`` in place of ``lightning.pytorch``.

They are the same files, read with the other names of Lightning and of one another.
"""

from pathlib import Path
from typing import Any

from lightning_utilities.core import rank_zero

_log = rank_zero.log
import pytorch_lightning as pytorch_lightning  # noqa: E402 - it takes over the logger of messages, which other tests read

rank_zero.log = _log

_ALIKE = ("models", "runs", "cli_data")


def read(name: str, into: dict[str, Any]) -> None:
    """Run the file ``tests/<name>.py`` under the other names, in the namespace of a module here."""
    path = Path(__file__).parent.parent / f"{name}.py"
    text = (
        path.read_text()
        .replace("lightning.pytorch", "pytorch_lightning")
        .replace("lightning.fabric", "lightning_fabric")
    )
    for other in _ALIKE:
        text = text.replace(f"from tests.{other} import", f"from tests.pl.{other} import")
    into["__file__"] = str(path)
    exec(compile(text, path, "exec"), into)
