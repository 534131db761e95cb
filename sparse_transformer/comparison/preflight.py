"""The checks made before the first run of a comparison trains."""

import itertools
from collections.abc import Iterable

import jax

from sparse_transformer import atomic, data, schema
from sparse_transformer.comparison.plan import Comparison, Trial
from sparse_transformer.training import costs, loop, warm_start, workdir
from sparse_transformer.training.experiment import Experiment

# The largest ratio at which numbers of keys count as equal.
MAX_RATIO = 1.1


def begin(plan: Comparison, number: int = 1) -> None:
  """Checks a comparison, and creates its folder with a description of it.

  Args:
    plan: the comparison.
    number: the number of runs that train in parallel.

  Raises:
    ValueError or OSError: the folder contains something else, or a run is
      impossible, see `check_runs`.
  """
  workdir.check_folder(plan.root, "config.json", "a run of train.py")
  digests = check_runs(plan, number)
  identity = plan.about() | dict(data=digests)
  path = plan.root / workdir.COMPARISON
  if path.exists():
    old = atomic.read_json(path, dict)
    if old != identity:
      # If the data have changed since an earlier call, old runs must not be
      # compared with new ones.
      is_same_plan = old | dict(data=digests) == identity
      what = "other data" if is_same_plan else "another comparison"
      raise ValueError(f"{path} describes {what}; use another --workdir")

  plan.root.mkdir(parents=True, exist_ok=True)
  atomic.write_json(path, identity)


def check_runs(plan: Comparison, number: int = 1) -> list[dict]:
  """Checks the runs of a comparison as far as possible without training.

  The check computes nothing on a GPU. Otherwise, JAX would allocate most of the
  GPU's memory for this process, and too little would remain for the processes
  of the runs.

  Args:
    plan: the comparison.
    number: the number of runs that train in parallel, each on its share of the
      GPUs.

  Returns:
    The descriptions of all data, see `Source.digest`.

  Raises:
    ValueError or OSError: a run is impossible, the losses of runs have
      different units, or `plan.equal_keys` is set and the numbers of keys per
      query differ by more than 10 %.
  """
  sources: dict[schema.Data, data.Source] = {}  # equal data are read once
  keys: dict[str, float] = {}
  units: dict[str, str] = {}

  # A run uses only its share of the GPUs, which must divide its batch.
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
    raise ValueError(
      f"--vary: losses with different units cannot be compared: {examples}"
    )

  if plan.equal_keys and max(keys.values()) > MAX_RATIO * min(keys.values()):
    examples = ", ".join(f"{keys[x]:,.1f} with {x}" for x in keys)
    raise ValueError(
      f"--equal=keys: keys per query differ by more than 10 %: {examples}"
    )
  return [source.digest() for source in sources.values()]


def _check_run(experiment):
  """Raises ValueError or OSError if a run is impossible.

  The check finds errors that would otherwise occur only after hours of
  training, such as a missing test split or weights that do not fit the network.
  """
  loop.check(experiment)
  for split in "validation", "test":
    # Read one window, to check that the split exists and is not empty.
    _ = experiment.source.windows(split)[0]

  config = experiment.config
  if config.train.init_from:
    # Load the weights on a single CPU device, regardless of the mesh of the
    # run.
    alone = config.replace(**{f"mesh.{x}": 1 for x in config.mesh.keys()})
    cpu = jax.devices("cpu")[0]
    warm_start.first_state(Experiment(alone, (cpu,), experiment.source))


def _distinct(plan: Comparison) -> Iterable[Trial]:
  """Yields the runs of a plan, with a single seed for each setting.

  If these runs are possible, the runs with other seeds are possible, too.
  """
  seed = plan.seeds[-1] + bool(plan.tune)  # the highest seed in use
  candidates = plan.tune.values if plan.tune else [""]
  for choice, candidate in itertools.product(plan.choices, candidates):
    yield Trial(
      plan=plan,
      choice=choice,
      candidate=candidate,
      seed=seed,
    )
  # A separate tuning budget may have too few steps for an
  # optimizer.warmup_steps that varies.
  if plan.tune_budget:
    yield from plan.tuning
