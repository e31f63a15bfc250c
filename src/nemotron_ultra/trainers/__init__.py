"""The step loop and one file per trainer."""

import os

# Read once, when torch loads its OpenMP runtime. Threads that spin while they wait take the cores from each
# other as soon as anything else runs on the machine: steps were 10 to 20 times slower there, and on a quiet
# machine the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
