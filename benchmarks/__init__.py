"""Side-by-side measurements: `python -m benchmarks.NAME`."""

import rlite  # before torch, which reads the settings of OpenMP once
