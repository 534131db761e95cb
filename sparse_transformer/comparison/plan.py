"""What a comparison compares, and where its runs are."""

import dataclasses
import json
import pathlib
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer import machine
from sparse_transformer.comparison.budget import LIMIT, Budget
from sparse_transformer.comparison.choices import (
  folder_name,
  with_steps,
  with_values,
)


@dataclasses.dataclass(frozen=True)
class Plan:
  """The runs of a comparison: each choice with each seed.

  Attributes:
    config: config of the experiment.
    root: the comparison's folder.
    field: the field that varies, "group.name".
    choices: its values.
    budget: the budget of each run.
    seeds: number of runs with each value.
  """

  config: ConfigDict
  root: pathlib.Path
  field: str
  choices: list[str]
  budget: Budget
  seeds: int

  def workdir(self, choice: str, seed: int) -> pathlib.Path:
    """The folder of a run."""
    return self.root / folder_name(choice) / f"seed{seed}"

  def config_of(
    self, choice: str, seed: int = 0, steps: int = LIMIT - 1
  ) -> ConfigDict:
    """The config of a run; steps that are not yet known may be many."""
    values = {self.field: choice, "train.seed": seed}
    return with_steps(with_values(self.config, **values), steps, self.field)

  def about(self) -> dict[str, Any]:
    """What tells this comparison from others, as JSON."""
    about = dict(
      field=self.field,
      choices=self.choices,
      budget=self.budget,
      seeds=self.seeds,
      machine=machine.machine(),
      config=self.config.to_dict(),
    )
    return json.loads(json.dumps(about))
