"""The machine: its memory."""

import os
import pathlib
import subprocess
import sys

import pytest

# The fewest pages that a run of a program has to get from the system. The heap
# may have to grow once more in the first runs.
PROGRAM = """
import resource

import jax
import jax.numpy as jnp

from sparse_transformer import machine

machine.keep_freed_memory()
large = jax.jit(lambda x: jnp.sort(jnp.outer(x, x), axis=0).sum())
x = jnp.ones(4096)

counts = []
for _ in range(12):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  large(x).block_until_ready()
  after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  counts.append(after - before)

with open("/proc/self/smaps") as file:
  flags = [line.split() for line in file if line.startswith("VmFlags")]
print(min(counts), any("hg" in names for names in flags))
"""
HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage")


@pytest.mark.soak  # 14 seconds of a processor
@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_steps_reuse_the_memory_of_steps_before():
  command = [sys.executable, "-c", PROGRAM]
  # Programs of runs are optimized, those of the suite are not.
  environment = dict(os.environ)
  environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
  output = subprocess.run(
    command, capture_output=True, text=True, check=True, env=environment
  ).stdout

  # Its 64 MiB have 16,384 pages of 4 KiB.
  faults, has_huge_pages = output.split()
  assert int(faults) < 1000
  assert has_huge_pages == str(HUGE_PAGES.exists())
