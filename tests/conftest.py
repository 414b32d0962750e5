"""Settings of all tests: no example of a property has a deadline, since machines differ.

One thread computes in each process: tests run side by side, and so do their own processes.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("forerun", deadline=None)
settings.load_profile("forerun")
