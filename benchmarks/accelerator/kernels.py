"""The time of a training step by part of the network and by kernel.

A trace contains the time of each kernel and, in most cases, the instruction of
the compiled program that launched it. `benchmarks.traffic` assigns instructions
to parts of the network.
"""

import collections
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks import traffic
from sparse_transformer.attention import Unsupported

STEPS, SLOWEST = 3, 20


def profile(step: Callable[[], Any], text: str) -> dict:
  """Traces some steps and returns their `summarize`.

  Args:
    step: starts a training step and returns its result, without waiting for it.
    text: the program of a step, an optimized HLO module.
  """
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for _ in range(STEPS):
        state = step()
      jax.block_until_ready(state)
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
  return summarize(data, text)


def summarize(data: Any, text: str) -> dict:
  """Returns the time of a step by part and by kernel, and its idle share.

  Args:
    data: a `jax.profiler.ProfileData` of `STEPS` steps. If it contains several
      GPUs, the first is used.
    text: the program of a step, an optimized HLO module.

  Returns:
    {"parts": {part: {"launches", "ms"}}, "idle": share of the time without a
    kernel, "kernels": the slowest ones}.

  Raises:
    Unsupported: the trace has no kernels, because JAX cannot trace the device.
  """
  launches, ms = collections.Counter(), collections.Counter()
  first, busy, last = math.inf, 0.0, -math.inf
  for start, end, part, kernel in sorted(events(data, parts(text))):
    launches[part, kernel] += 1
    ms[part, kernel] += (end - start) / 1e6 / STEPS
    # Kernels of different streams overlap.
    first = min(first, start)
    busy += max(0.0, end - max(start, last))
    last = max(last, end)
  if not ms:
    raise Unsupported("the trace has no kernels of a GPU or a CPU")

  by_part = {part: dict(launches=0.0, ms=0.0) for part in traffic.PARTS}
  kernels = []
  for (part, kernel), time in ms.most_common():
    number = launches[part, kernel] / STEPS
    by_part[part]["launches"] += number
    by_part[part]["ms"] += time
    kernels.append(dict(kernel=kernel, part=part, launches=number, ms=time))
  idle = 1 - busy / (last - first)
  return dict(parts=by_part, idle=idle, kernels=kernels[:SLOWEST])


def events(data: Any, known: dict[str, str]) -> Iterator[tuple]:
  """Yields (start, end, part, name) of kernels, with times in nanoseconds.

  On a CPU, the executed instructions take the place of kernels.
  """
  gpus = [x for x in data.planes if x.name.startswith("/device:GPU")]
  (plane,) = gpus[:1] or [x for x in data.planes if x.name == "/host:CPU"]
  for line in plane.lines:
    if gpus and not line.name.startswith("Stream"):
      continue  # other lines repeat these kernels by step or by scope
    for x in line.events:
      if gpus or x.name in known:
        # A kernel of a CUDA graph may have a name only.
        instruction = dict(x.stats).get("hlo_op")
        part = known.get(instruction) or known.get(x.name, traffic.OUTSIDE)
        yield x.start_ns, x.start_ns + x.duration_ns, part, x.name


def parts(text: str) -> dict[str, str]:
  """Returns {instruction or name of its kernel: part} of a program."""
  found = {name: part for name, part, _ in traffic.costs(text)}
  # Kernels have the names of instructions without special characters.
  return {re.sub(r"\W", "_", x): part for x, part in found.items()} | found
