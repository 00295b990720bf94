"""``tests/models.py`` with pytorch_lightning."""

from tests import pl

pl.read("models", globals())
