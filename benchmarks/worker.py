"""A process that runs programs on request. Requests and answers are JSON.

A request is a line on standard input, {"do": method, ...}, and the answer is a
line on standard output. If the method raises an error, the answer is
{"failed": reason}.
"""

import dataclasses
import json
import os
import resource
import sys
import time
import timeit
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from sparse_transformer import patterns

MIN_SECONDS = 0.1  # shorter passes are repeated within a round


@dataclasses.dataclass(frozen=True)
class Entry:
  """A program of `ours.py` or `peers.py`, and the pattern that it runs."""

  program: str
  pattern: str
  n: int
  batch: int = 1
  heads: int = 4
  width: int = 64
  dtype: str = "float32"
  key_heads: int = 0  # 0: as many as heads
  # Number of documents of random lengths in each sequence; 0: no segments.
  documents: int = 0


@dataclasses.dataclass(frozen=True)
class Contestant:
  """A program compiled for an entry."""

  # The functions "forward" and, if the program supports it, "forward_backward".
  # They return their outputs when all are computed.
  passes: dict[str, Callable]
  # Converts an output to that of the first example, float64 [n, heads, width].
  first: Callable[[Any], np.ndarray]
  pattern: patterns.Pattern | None = None  # if it differs from the entry's
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def pattern_of(entry):
  ((pattern,),) = patterns.parse(entry.pattern)
  return pattern


def random_inputs(entry):
  """Returns q, k, v, dout, float32 [batch, n, heads, width].

  They are the same for all programs.
  """
  few = entry.key_heads or entry.heads
  rng = np.random.default_rng(0)
  return [
    rng.standard_normal((entry.batch, entry.n, h, entry.width), np.float32)
    for h in (entry.heads, few, few, entry.heads)
  ]


def segments(entry):
  """Returns the index of the document of each position, int [n]."""
  rng = np.random.default_rng(1)
  starts = rng.choice(entry.n, max(0, entry.documents - 1), replace=False)
  return np.digitize(np.arange(entry.n), np.sort(starts))


def mask_of(entry, pattern, rows):
  """Returns the mask of some query rows, within documents, bool [rows, n]."""
  document = segments(entry)
  mask = pattern.mask(rows[:, None], np.arange(entry.n))
  return mask & (document[rows][:, None] == document)


def reference(q_LHK, k_LGK, v_LGE, dout_LHE, mask_RL, rows):
  """Returns out_RHE and dq_RHK of the query rows R, computed in float64."""
  scale = q_LHK.shape[-1] ** -0.5
  outs, dqs = [], []
  for h in range(q_LHK.shape[1]):
    g = h * k_LGK.shape[1] // q_LHK.shape[1]
    q, k, v = q_LHK[rows, h], k_LGK[:, g], v_LGE[:, g]
    scores_RL = np.where(mask_RL, q @ k.T * scale, -np.inf)
    top_R1 = scores_RL.max(1, keepdims=True)
    p_RL = np.exp(scores_RL - np.where(np.isfinite(top_R1), top_R1, 0))
    sum_R1 = p_RL.sum(1, keepdims=True)
    p_RL /= np.where(sum_R1 == 0, 1, sum_R1)
    dp_RL = dout_LHE[rows, h] @ v.T
    ds_RL = p_RL * (dp_RL - (p_RL * dp_RL).sum(1, keepdims=True))
    outs.append(p_RL @ v)
    dqs.append(ds_RL @ k * scale)
  return np.stack(outs, 1), np.stack(dqs, 1)


def errors(entry, pattern, found):
  """Returns the largest absolute errors of out and dq.

  If n > 4,096, only 4M / n rows are checked.
  """
  num_rows = entry.n if entry.n <= 4096 else max(1, 2**22 // entry.n)
  rows = np.linspace(0, entry.n - 1, num_rows).astype(int)
  inputs = (x[0].astype(np.float64) for x in random_inputs(entry))
  exact = reference(*inputs, mask_of(entry, pattern, rows), rows)
  return [
    float(np.abs(value[rows] - truth).max())
    for value, truth in zip(found, exact, strict=False)
  ]


def num_threads():
  has_affinity = hasattr(os, "sched_getaffinity")
  return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()


class Worker:
  """Answers requests by calling its methods.

  Args:
    programs: functions that map an `Entry` to a `Contestant`.
    packages: the packages whose versions are reported.
  """

  def __init__(self, programs, packages):
    self.programs = {program.__name__: program for program in programs}
    self.packages = packages
    self.passes = []  # {name: (function, repeats)} of each contestant

  def versions(self):
    return {name: metadata.version(name) for name in self.packages}

  def prepare(self, entry):
    entry = Entry(**entry)
    contestant = self.programs[entry.program](entry)
    pattern, passes = contestant.pattern, {}
    pattern = pattern_of(entry) if pattern is None else pattern
    for name, run in contestant.passes.items():
      start = time.perf_counter()
      outputs = run()
      took = time.perf_counter() - start
      if took <= 1:  # measure again, because a first call may take longer
        took = timeit.timeit(run, number=1)
      passes[name] = run, max(1, round(MIN_SECONDS / took))
    self.passes.append(passes)
    found = [contestant.first(x) for x in outputs[:2]]
    # The peak memory of this process so far, which Linux counts in kilobytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return contestant.facts | {
      "index": len(self.passes) - 1,
      "passes": list(passes),
      "process_bytes": peak * 1024,
      "pairs": int(mask_of(entry, pattern, np.arange(entry.n)).sum())
      if entry.documents
      else pattern.pairs(entry.n),
      "errors": errors(entry, pattern, found),
    }

  def run(self, index, name):
    """Returns the seconds of one pass, averaged over its repeats."""
    run, repeats = self.passes[index][name]
    return {"seconds": timeit.timeit(run, number=repeats) / repeats}

  def serve(self):
    file = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries also print to standard output
    for line in sys.stdin:
      request = json.loads(line)
      try:
        answer = getattr(self, request.pop("do"))(**request)
      except Exception as error:
        text = str(error).strip() or "no message"
        answer = {"failed": f"{type(error).__name__}: {text.splitlines()[0]}"}
      print(json.dumps(answer), file=file, flush=True)
