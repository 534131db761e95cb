"""Triton's kernels under NVIDIA's compute-sanitizer, where it is installed.

  compute-sanitizer python -m benchmarks.accelerator.sanitizer

runs the checks of `correctness` on one small mix in each dtype. The sanitizer
looks for accesses out of bounds (memcheck), races (racecheck), and reads of
memory that nothing has written (initcheck).
"""

import os
import re
import shutil
import subprocess
import sys

from benchmarks.record import REPO

TOOLS = "memcheck", "racecheck", "initcheck"
SECONDS = 55  # the most that a tool may take
FOUND = 9  # exit status if it finds something
# Our kernels only: XLA's may read what they then do not use.
KERNELS = "--kernel-name=kns=forward", "--kernel-name=kns=backward"
ENVIRONMENT = {
  # Arrays get their own allocations, so that reads beyond them are noticed.
  "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
  "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
}
COMMAND = sys.executable, "-m", "benchmarks.accelerator.sanitizer"


def entries() -> dict:
  return {f"triton, {tool}": lambda _, tool=tool: run(tool) for tool in TOOLS}


def run(tool: str) -> dict:
  """What a tool finds, as the result of an entry."""
  path = shutil.which("compute-sanitizer")
  if path is None:
    return {"skipped": "compute-sanitizer is not installed"}
  options = f"--tool={tool}", f"--error-exitcode={FOUND}", *KERNELS
  try:
    done = subprocess.run(
      [path, *options, *COMMAND],
      cwd=REPO,
      env=os.environ | ENVIRONMENT,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=SECONDS,
    )
  except subprocess.TimeoutExpired:
    return {"skipped": f"it took more than {SECONDS} seconds"}
  if not done.returncode:
    return {}
  if "Device not supported" in done.stdout:
    return {"skipped": "compute-sanitizer does not support this machine"}
  lines = done.stdout.splitlines() or ["no message"]
  errors = [x for x in lines if re.match(r"=+ .*(Error|Invalid|Uninit)", x)]
  reason = (errors or lines[-1:])[0].strip("= ")
  return {"failed": f"exit status {done.returncode}: {reason}"[:300]}


def main():
  """Fails if the kernels are wrong; the sanitizer looks at what they do."""
  from benchmarks.accelerator import correctness

  for dtype in correctness.TOLERANCES:
    mix = correctness.mixes(False, dtype)["catalogue 4"]
    found = correctness.check("triton", mix, dtype)
    if "errors" not in found or "failed" in found:
      sys.exit(str(found))


if __name__ == "__main__":
  main()
