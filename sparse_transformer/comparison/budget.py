"""Training budgets: steps, time or FLOPs, converted to steps."""

import math
import statistics
import time
from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from sparse_transformer.training import costs
from sparse_transformer.training.experiment import Experiment

# The clocks of budgets of time.
CLOCKS = dict(seconds=time.perf_counter, processor_seconds=time.process_time)
BUDGETS = "steps", *CLOCKS, "flops"
WARMUP_STEPS, TIMED_STEPS = 3, 10  # for measuring the speed

# The optimizer counts steps in 32 bits; as seconds, these are 68 years.
LIMIT = 2**31

Budget = tuple[str, float]  # what is limited, and to how much


def parse_budget(text: str) -> Budget:
  """What is limited, and to how much.

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
      f" flops:N with N above 0; steps are whole, and steps and seconds below"
      f" {LIMIT:,}"
    )
  return kind, amount


def count_steps(config: ConfigDict, budget: Budget) -> int:
  """The number of training steps that a budget allows.

  Seconds allow at least one, so that a slow choice does not end a comparison.

  Raises:
    ValueError: if FLOPs do not allow one, or if they are more than can be
      counted.
  """
  kind, amount = budget
  if kind == "steps":
    return int(amount)
  if kind == "flops":
    of_step: float = flops_per_step(config)
    steps = amount / of_step
  else:
    of_step = seconds_per_step(config, CLOCKS[kind])
    steps = max(1, amount / of_step)
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


def seconds_per_step(
  config: ConfigDict, clock: Callable[[], float] = time.perf_counter
) -> float:
  """Median time of a few steps, whose results are discarded."""
  experiment = Experiment(config)
  batches = experiment.batches(experiment.source.examples("train"))
  state = jax.jit(experiment.init)()
  step = jax.jit(experiment.step, donate_argnums=0)
  times = []
  for i in range(WARMUP_STEPS + TIMED_STEPS):
    batch = jax.device_put(batches[i], experiment.batch_sharding)
    start = clock()
    state, _ = jax.block_until_ready(step(state, batch))
    times.append(clock() - start)
  return statistics.median(times[WARMUP_STEPS:])
