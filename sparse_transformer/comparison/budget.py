"""Training budgets: steps, times or FLOPs, converted to steps."""

import itertools
import math
import statistics
import time
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from sparse_transformer.training.analysis import costs
from sparse_transformer.training.experiment import Experiment

# How time is measured: by the clock, or as that of all threads of the process.
CLOCKS = {"seconds": time.perf_counter, "processor_seconds": time.process_time}
BUDGETS = "steps", *CLOCKS, "flops"
WARMUP_STEPS, TIMED_STEPS = 3, 10  # for measuring the speed

# The optimizer counts steps in 32 bits; as seconds, these are 68 years.
LIMIT = 2**31

Budget = tuple[str, float]  # what is limited, and to how much


def parse_budget(text: str) -> Budget:
  """Parses what is limited, and to how much.

  >>> parse_budget("steps:500")
  ('steps', 500.0)

  Raises:
    ValueError: if the text is not a budget, or the amount is out of range.
  """
  kind, _, number = text.partition(":")
  try:
    amount = float(number)
  except ValueError:
    amount = 0
  limit = math.inf if kind == "flops" else LIMIT
  whole = kind != "steps" or amount % 1 == 0
  if kind not in BUDGETS or not 0 < amount < limit or not whole:
    raise ValueError(
      f"--budget={text} must be steps:N, seconds:N, processor_seconds:N or"
      " flops:N with N above 0; steps are whole, and steps and seconds below"
      f" {LIMIT:,}"
    )
  return kind, amount


def count_steps(config: ConfigDict, budget: Budget) -> int:
  """`steps_within` a budget of steps or FLOPs."""
  of_step = 1 if budget[0] == "steps" else flops_per_step(config)
  return steps_within(budget, of_step)


def steps_within(budget: Budget, of_step: float) -> int:
  """The number of steps that a budget allows if each takes `of_step` of it.

  A time allows at least one, so that a slow choice does not end a comparison.

  Raises:
    ValueError: if FLOPs do not allow one, or if they are more than can be
      counted.
  """
  kind, amount = budget
  steps = amount / of_step
  if kind in CLOCKS:
    steps = max(1, steps)
  if not 1 <= steps < LIMIT:
    raise ValueError(
      f"--budget={kind}:{amount:g} allows {steps:.3g} steps of {of_step:.3g}"
      f" {kind} each; it must allow at least 1 and fewer than {LIMIT:,}"
    )
  return int(steps)


def flops_per_step(config: ConfigDict) -> int:
  """FLOPs of the weights and of attention in one step, see `costs.step`.

  Those added by rematerialization do not count.
  """
  model = Experiment(config).model
  flops = costs.step(config, model, costs.count_pairs(model))["flops"]
  return flops["weights"] + flops["attention"]


def time_per_step(experiments: Sequence[Experiment], kind: str) -> list[float]:
  """Median time of a training step of each experiment.

  Their steps take turns, so that noise slows all of them alike. The results are
  discarded. The states of all are in memory at once. `kind` is of `CLOCKS`.
  """
  clocked = [_clocked(x, CLOCKS[kind]) for x in experiments]
  rounds = [
    [next(times) for times in clocked]
    for _ in range(WARMUP_STEPS + TIMED_STEPS)
  ]
  of_each = zip(*rounds[WARMUP_STEPS:], strict=True)
  return [statistics.median(times) for times in of_each]


def _clocked(experiment, clock):
  """Trains a new state, and yields the time of each step and its batch."""
  state = experiment.first_state()
  for i in itertools.count():
    start = clock()
    batch = experiment.batch(i)
    with jax.set_mesh(experiment.mesh):
      state, _ = jax.block_until_ready(experiment.update(state, batch))
    yield clock() - start
