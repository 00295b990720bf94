"""``tests/runs.py`` with pytorch_lightning."""

from tests import pl

pl.read("runs", globals())
