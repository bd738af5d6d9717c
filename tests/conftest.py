"""What all tests share."""

import os

# Ray reads its token once in a process, which may run tests of several clusters.
os.environ["RAY_AUTH_TOKEN"] = "0" * 64
# Four fifths of the suite's time is compiling, which takes less than half as long with LLVM's
# lower level and one emitter of loops for all; `XLA_FLAGS= pytest` tests with XLA's own choice.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
