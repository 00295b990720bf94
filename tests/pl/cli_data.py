"""``tests/cli_data.py`` with pytorch_lightning."""

from tests import pl

pl.read("cli_data", globals())
