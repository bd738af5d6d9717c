"""What all tests share."""

import os
from collections.abc import Generator

import pytest

# Ray reads its token once in a process, which may run tests of several clusters.
os.environ["RAY_AUTH_TOKEN"] = "0" * 64
# Most of the suite's time is compiling, which takes half as long at a lower level of LLVM, with
# XLA's older emitters and in one part, and half of that at the lowest level, which suits programs
# that run for a second; `XLA_FLAGS= JAX_DISABLE_MOST_OPTIMIZATIONS=0 pytest` tests what a run
# compiles.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# A thread for XLA in each of pytest's processes, of which there is one for each core.
os.environ["NPROC"] = "1"

import jax


@pytest.fixture(autouse=True)
def programs_for_longer_runs(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Generator[None, None, None]:
    """Optimize what tests that learn or run for long compile, also in processes that they start."""
    if not {"learning", "optimized"} & set(request.keywords):
        yield
        return
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    # Programs that earlier tests left round otherwise, and so learn otherwise.
    jax.clear_caches()
    quick = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", quick)
