"""The number of steps of each run: decided once, and kept in its steps.json."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer import atomic
from sparse_transformer.comparison import budget as budget_lib, process
from sparse_transformer.comparison.folder import read_json
from sparse_transformer.comparison.plan import Plan

NAME = "steps.json"


def decide(plan: Plan) -> None:
  """Writes steps.json of all runs that have none.

  Runs with the same value have equally many steps.
  """
  new = [choice for choice in plan.choices if _known(plan, choice) is None]
  if new and plan.budget[0] in budget_lib.CLOCKS:
    print(f"measuring the steps of {', '.join(new)}", flush=True)
    folders = {
      str(plan.workdir(choice, 0)): plan.config_of(choice).to_dict()
      for choice in new
    }
    task = f"the measurement of steps in {plan.root}"
    process.call(task, measure, folders, plan.budget)
  for choice in plan.choices:
    steps = _known(plan, choice)
    if steps is None:
      steps = budget_lib.count_steps(plan.config_of(choice), plan.budget)
    for seed in range(plan.seeds):
      if not (plan.workdir(choice, seed) / NAME).exists():
        _write(plan.workdir(choice, seed), steps)


def read(workdir: pathlib.Path) -> int:
  """The number of steps of the run in a workdir.

  Raises:
    ValueError: its steps.json is damaged.
  """
  steps = read_json(workdir / NAME)
  if type(steps) is not int:
    raise ValueError(
      f"{workdir / NAME} must be a whole number, not {steps!r}; delete it"
    )
  return steps


def _known(plan, choice):
  """The steps of the first run with a value that has them, else None."""
  for seed in range(plan.seeds):
    if (plan.workdir(choice, seed) / NAME).exists():
      return read(plan.workdir(choice, seed))
  return None


def _write(workdir, steps):
  workdir.mkdir(parents=True, exist_ok=True)
  atomic.write_text(workdir / NAME, json.dumps(steps))


def measure(
  settings: Mapping[str, Mapping[str, Any]], budget: budget_lib.Budget
) -> None:
  """Writes the steps that a time allows with each config.

  Args:
    settings: configs, by the folder to write steps.json to.
    budget: the time of each run.
  """
  configs = [ConfigDict(config).lock() for config in settings.values()]
  times = budget_lib.time_per_step(configs, budget[0])
  for folder, time in zip(settings, times, strict=True):
    _write(pathlib.Path(folder), budget_lib.steps_within(budget, time))
