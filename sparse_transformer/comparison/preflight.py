"""What is checked before the first run of a comparison trains."""

import itertools
from collections.abc import Iterable

import jax

from sparse_transformer import atomic, data, schema
from sparse_transformer.comparison.plan import Comparison, Trial
from sparse_transformer.training import costs, loop, warm_start, workdir
from sparse_transformer.training.experiment import Experiment

# The largest ratio of numbers of keys that count as equal.
MAX_RATIO = 1.1


def begin(plan: Comparison, number: int = 1) -> None:
  """Checks a comparison, and creates its folder, which says what it compares.

  Args:
    plan: the comparison.
    number: how many runs take place at the same time.

  Raises:
    ValueError or OSError: the folder holds something else, or a run cannot take
      place, see `check_runs`.
  """
  workdir.check_folder(plan.root, "config.json", "a run of train.py")
  digests = check_runs(plan, number)
  identity = plan.about() | dict(data=digests)
  path = plan.root / workdir.COMPARISON
  if path.exists():
    old = atomic.read_json(path, dict)
    if old != identity:
      # Data may change between two calls, and old runs must not be
      # compared to new.
      is_same_plan = old | dict(data=digests) == identity
      what = "other data" if is_same_plan else "another comparison"
      raise ValueError(f"{path} is of {what}; use another --workdir")

  plan.root.mkdir(parents=True, exist_ok=True)
  atomic.write_json(path, identity)


def check_runs(plan: Comparison, number: int = 1) -> list[dict]:
  """Checks the runs of a comparison as far as possible without training.

  Computes nothing on a GPU: JAX would then allocate most of its memory for this
  process, and the processes of the runs need it.

  Args:
    plan: the comparison.
    number: how many runs at the same time divide the GPUs among them.

  Returns:
    The digests of all data.

  Raises:
    ValueError or OSError: a run is impossible, units differ, or keys differ and
      must not.
  """
  sources: dict[schema.Data, data.Source] = {}  # equal data are read once
  keys: dict[str, float] = {}
  units: dict[str, str] = {}

  # A run has only its part of the GPUs, and its batch must be divisible by it.
  parts = number if jax.default_backend() == "gpu" else 1
  devices = tuple(jax.devices()[: jax.device_count() // parts])

  for trial in _distinct(plan):
    config = trial.config
    experiment = Experiment(config, devices, sources.get(config.data))
    sources[config.data] = experiment.source
    _check_run(experiment)

    label = str(trial)
    keys[label] = costs.keys_per_query(experiment.model)
    units[experiment.source.unit] = label

  if len(units) > 1:
    examples = ", ".join(f"{x} with {units[x]}" for x in units)
    raise ValueError(f"--vary: losses have different units: {examples}")

  if plan.equal_keys and max(keys.values()) > MAX_RATIO * min(keys.values()):
    examples = ", ".join(f"{keys[x]:,.1f} with {x}" for x in keys)
    raise ValueError(
      f"--equal=keys: keys per query differ by more than 10 %: {examples}"
    )
  return [source.digest() for source in sources.values()]


def _check_run(experiment):
  """Raises ValueError or OSError if a run is impossible.

  Runs that fail after hours, for want of a test split or because weights do not
  fit the network, are found here.
  """
  loop.check(experiment)
  for split in "validation", "test":
    # Reading one window shows that the split is there and is not empty.
    _ = experiment.source.windows(split)[0]

  config = experiment.config
  if config.train.init_from:  # its weights are loaded, on a CPU
    # One device holds the weights, whatever the mesh of the run
    # divides them over.
    alone = config.replace(**{f"mesh.{x}": 1 for x in config.mesh.keys()})
    cpu = jax.devices("cpu")[0]
    warm_start.first_state(Experiment(alone, (cpu,), experiment.source))


def _distinct(plan: Comparison) -> Iterable[Trial]:
  """Yields the runs that differ in more than their seed.

  They are not all the runs of the plan, but if these can take place, all can.
  """
  seed = plan.seeds[-1] + bool(plan.tune)  # the highest in use
  candidates = plan.tune.values if plan.tune else [""]
  for choice, candidate in itertools.product(plan.choices, candidates):
    yield Trial(
      plan=plan,
      choice=choice,
      candidate=candidate,
      seed=seed,
    )
  # Another budget may be too few steps for an
  # optimizer.warmup_steps that varies.
  if plan.tune_budget:
    yield from plan.tuning
