"""What all tests share."""

import os

# Ray reads its token once in a process, which may run tests of several clusters.
os.environ["RAY_AUTH_TOKEN"] = "0" * 64
# Most of the suite's time is compiling, which takes half as long at a lower level of LLVM and with
# XLA's older emitters; `XLA_FLAGS= pytest` tests what a run compiles.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
# A thread for XLA in each of pytest's processes, of which there is one for each core.
os.environ["NPROC"] = "1"
