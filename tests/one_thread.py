"""One thread for each library that numpy and torch multiply with; import this before numpy.

The workers of pytest-xdist take every core. Threads beside them wait for each other: a Cholesky factor of 256
columns took half a second instead of a millisecond. Processes that a test starts inherit it.
"""

import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
