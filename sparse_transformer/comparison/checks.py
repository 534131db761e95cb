"""What is wrong with a comparison is found before it writes anything."""

from sparse_transformer.comparison import budget as budget_lib, experiments
from sparse_transformer.comparison.plan import Plan
from sparse_transformer.training import loop


def check(plan: Plan) -> None:
  """Checks the runs of a comparison as far as possible without training.

  Computes nothing on a device: JAX would then allocate most of a GPU's memory
  for this process, and the processes of the runs need it.

  Raises:
    ValueError: a run is impossible, or two choices stand for the same run.
    OSError: the data of a run cannot be read.
  """
  configs = (_config(plan, choice) for choice in plan.choices)
  group, name = plan.field.split(".")
  kinds: dict[str, tuple] = {}
  for choice, experiment in zip(
    plan.choices, experiments.make(configs), strict=True
  ):
    loop.check(experiment)
    for split in "validation", "test":
      _ = experiment.source.windows(split)[0]
    # Different texts and settings may give the same patterns.
    value = None if group == "attention" else experiment.config[group][name]
    kind = experiment.model, value
    for other in kinds:
      if kinds[other] == kind:
        raise ValueError(
          f"--vary: {plan.field}={other} and {plan.field}={choice} are the"
          " same; leave one out"
        )
    kinds[choice] = kind


def _config(plan, choice):
  """The config of a run; a time, not measured yet, may allow any steps."""
  config = plan.config_of(choice)
  if plan.budget[0] in budget_lib.CLOCKS:
    return config
  steps = budget_lib.count_steps(config, plan.budget)
  return plan.config_of(choice, steps=steps)
