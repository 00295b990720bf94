import sys, importlib
from tests.published import engine
from tests.published.techniques import TRIED
for name in sys.argv[1].split(","):
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else list(TRIED)
    engine.check(importlib.import_module(f"tests.published.packages.{name}").PACKAGE, names)
