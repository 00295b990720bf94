"""``tests/tune/tasks.py`` with pytorch_lightning."""

from tests import pl

pl.read("tune/tasks", globals())
