"""What is wrong with a comparison is found before it writes anything."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from sparse_transformer.comparison import budget as budget_lib
from sparse_transformer.comparison.choices import with_steps, with_values
from sparse_transformer.training import loop
from sparse_transformer.training.experiment import Experiment


def check(
  config: ConfigDict,
  field: str,
  choices: Sequence[str],
  budget: budget_lib.Budget,
  split: str,
) -> None:
  """Checks the runs of a comparison as far as possible without training.

  Args:
    config: config of the experiment.
    field: the field that varies, "group.name".
    choices: its values.
    budget: the budget of each run.
    split: split to evaluate on.

  Raises:
    ValueError: a run is impossible, or two choices stand for the same run.
    OSError: the data of a run cannot be read.
  """
  kinds: dict[str, tuple] = {}
  for choice in choices:
    chosen = with_values(config, **{field: choice})
    steps = budget_lib.LIMIT - 1  # unknown: seconds are measured by the run
    if budget[0] not in budget_lib.CLOCKS:
      steps = budget_lib.count_steps(chosen, budget)
    experiment = Experiment(with_steps(chosen, steps, field))
    loop.check(experiment)
    _ = experiment.source.windows(split)[0]
    # Different texts and settings may give the same patterns.
    group, name = field.split(".")
    value = None if group == "attention" else chosen[group][name]
    kind = experiment.model, value
    for other in kinds:
      if kinds[other] == kind:
        raise ValueError(
          f"--vary: {field}={other} and {field}={choice} are the same; leave"
          " one out"
        )
    kinds[choice] = kind
