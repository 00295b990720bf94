import sys, importlib, traceback
from tests.published import engine
from tests.published.techniques import TRIED
for name in sys.argv[1].split(","):
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else list(TRIED)
    try: engine.check(importlib.import_module(f"tests.published.packages.{name}").PACKAGE, names)
    except BaseException as e: print(name, "PACKAGE", engine._short(e))
