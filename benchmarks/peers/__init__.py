"""The standing comparison of techniques with their peers: ``python -m benchmarks.peers``."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler prints two lines for each use
