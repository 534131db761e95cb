"""A process that runs programs on request; requests and answers are JSON.

A request is one line on standard input, {"do": method, ...}, and its answer is
one line on what was standard output: {"failed": reason} if it raised.
"""

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.cases import Entry
from sparse_transformer import patterns

MIN_SECONDS = 0.1  # shorter passes are repeated within a round


@dataclasses.dataclass(frozen=True)
class Contestant:
  """A program, compiled for an entry.

  Attributes:
    passes: "forward" and, if the program has one, "forward_backward": functions
      that return their outputs once all of them are computed.
    inputs: q, k, v, dout of the first example, [n, heads, width], float64.
    values: function from the outputs of the last pass to out and, after a
      backward pass, dq, of the same shape and dtype as `inputs`.
    temp_bytes: temporary memory of forward + backward.
    pattern: what the program runs, if it differs from the entry's pattern.
  """

  passes: dict[str, Callable]
  inputs: tuple[np.ndarray, ...]
  values: Callable
  temp_bytes: int | None = None
  pattern: patterns.Pattern | None = None


def pattern_of(entry):
  """The pattern of an entry."""
  ((pattern,),) = patterns.parse(entry.pattern)
  return pattern


def random_inputs(entry):
  """q, k, v, dout: float32 [batch, n, heads, width], the same for all."""
  shape = entry.batch, entry.n, entry.heads, entry.width
  rng = np.random.default_rng(0)
  return [rng.standard_normal(shape, np.float32) for _ in range(4)]


def reference(q_LHK, k_LHK, v_LHE, dout_LHE, pattern, rows):
  """out_RHE and dq_RHK of the query rows R, computed in float64."""
  mask_RL = pattern.mask(rows[:, None], np.arange(len(k_LHK)))
  scale = q_LHK.shape[-1] ** -0.5
  outs, dqs = [], []
  for h in range(q_LHK.shape[1]):
    q, k, v = q_LHK[rows, h], k_LHK[:, h], v_LHE[:, h]
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


def errors(inputs, values, pattern):
  """Largest absolute errors of out and, if there is a backward pass, of dq.

  Compares all rows up to n = 4,096, and 4M / n of them beyond.
  """
  n = len(inputs[0])
  num_rows = n if n <= 4096 else max(1, 2**22 // n)
  rows = np.linspace(0, n - 1, num_rows).astype(int)
  exact = reference(*inputs, pattern, rows)
  return [
    float(np.abs(value[rows] - truth).max())
    for value, truth in zip(values, exact, strict=False)
  ]


def warm_up(function):
  """(outputs, seconds of a call after the first, which may take longer)."""
  start = time.perf_counter()
  outputs = function()
  took = time.perf_counter() - start
  return outputs, took if took > 1 else seconds(function)


def seconds(function):
  """Wall-clock seconds of a call."""
  start = time.perf_counter()
  function()
  return time.perf_counter() - start


def rate(work, function):
  """Work per second: the best call in half a second, after a first one."""
  function()
  times, end = [], time.perf_counter() + 0.5
  while len(times) < 3 or time.perf_counter() < end:
    times.append(seconds(function))
  return work / min(times)


def num_threads():
  """Number of CPUs that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


class Worker:
  """Answers requests by calling its methods by name.

  Args:
    programs: {name: function from an entry to a `Contestant`}.
    hello: function that returns what this process runs on.
    rates: function that measures matmul, copy and exp rates.
    forget: function that drops compiled programs.
  """

  def __init__(self, programs, hello, rates, forget):
    self.programs = programs
    self.hello, self.rates = hello, rates
    self._forget = forget
    self.contestants, self.repeats = [], []

  def prepare(self, entry):
    """Compiles an entry, warms it up, and checks its results."""
    entry = Entry(**entry)
    contestant = self.programs[entry.program](entry)
    pattern = contestant.pattern or pattern_of(entry)
    took = {}
    for name, run in contestant.passes.items():
      outputs, took[name] = warm_up(run)
    facts = {"index": len(self.contestants), "passes": list(took)}
    facts["temp_bytes"] = contestant.temp_bytes
    # Kilobytes on Linux: the peak of this process so far.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    facts["process_bytes"] = usage.ru_maxrss * 1024
    facts["pairs"] = pattern.pairs(entry.n)
    values = contestant.values(outputs)
    facts["errors"] = errors(contestant.inputs, values, pattern)
    self.contestants.append(contestant)
    self.repeats.append(
      {name: max(1, round(MIN_SECONDS / s)) for name, s in took.items()}
    )
    return facts

  def run(self, index, name):
    """Seconds of one pass, averaged over its repeats."""
    run, repeats = self.contestants[index].passes[name], self.repeats[index]
    total = seconds(lambda: [run() for _ in range(repeats[name])])
    return {"seconds": total / repeats[name]}

  def forget(self):
    """Drops all compiled entries."""
    self.contestants.clear()
    self.repeats.clear()
    self._forget()
    return {}

  def serve(self):
    """Answers requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries also print to standard output
    for line in sys.stdin:
      request = json.loads(line)
      try:
        answer = getattr(self, request.pop("do"))(**request)
      except Exception as error:
        text = str(error).strip() or "no message"
        reason = f"{type(error).__name__}: {text.splitlines()[0]}"
        answer = {"failed": reason}
      print(json.dumps(answer), file=answers, flush=True)
