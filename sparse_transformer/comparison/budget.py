"""Training budgets: steps, times or FLOPs."""

import math

from ml_collections import ConfigDict

from sparse_transformer.training import metrics
from sparse_transformer.training.analysis import costs
from sparse_transformer.training.experiment import Experiment

BUDGETS = "steps", *metrics.TIMES, "flops"

# The optimizer counts steps in 32 bits; as seconds, these are 68 years.
LIMIT = 2**31

Budget = tuple[str, float]  # what is limited, and to how much


def parse_budget(text: str, flag: str = "budget") -> Budget:
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
      f"--{flag}={text} must be steps:N, seconds:N, processor_seconds:N or"
      " flops:N with N above 0; steps are whole, and steps and seconds below"
      f" {LIMIT:,}"
    )
  return kind, amount


def count_steps(config: ConfigDict, budget: Budget) -> int:
  """The steps of a run; the most that one may have if a time ends it.

  Raises:
    ValueError: if FLOPs do not allow one, or if they are more than can be
      counted.
  """
  kind, amount = budget
  if kind != "steps" and config.attention.schedule:
    raise ValueError(
      f"--budget={kind}:{amount:g} leaves open whether a run reaches the steps"
      " of attention.schedule; use steps:N"
    )
  if kind in metrics.TIMES:
    return LIMIT - 1
  of_step = 1 if kind == "steps" else flops_per_step(config)
  steps = amount / of_step
  if not 1 <= steps < LIMIT:
    raise ValueError(
      f"--budget={kind}:{amount:g} allows {steps:.3g} steps of {of_step:.3g}"
      f" {kind} each; it must allow at least 1 and fewer than {LIMIT:,}"
    )
  return int(steps)


def flops(config: ConfigDict, steps: int) -> int:
  """FLOPs of the first steps of a run, with the pattern of each."""
  parts = Experiment(config).steps_by_phase(steps)
  return sum(num * flops_per_step(phase.config) for num, phase in parts)


def keys(experiment: Experiment) -> float:
  """Keys per query, the mean over the steps of a run."""
  steps = experiment.config.train.steps
  parts = experiment.steps_by_phase(steps)
  return sum(x * costs.keys_per_query(y.model) for x, y in parts) / steps


def flops_per_step(config: ConfigDict) -> int:
  """FLOPs of the weights and of attention in one step, see `costs.step`.

  Those added by rematerialization do not count.
  """
  model = Experiment(config).model
  flops = costs.step(config, model, costs.count_pairs(model))["flops"]
  return flops["weights"] + flops["attention"]
