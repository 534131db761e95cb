"""What is checked before the first run of a comparison trains."""

import itertools

import jax

from sparse_transformer import atomic, data, schema
from sparse_transformer.comparison.plan import Comparison, Trial
from sparse_transformer.training import costs, loop, warm_start, workdir
from sparse_transformer.training.experiment import Experiment

MAX_RATIO = 1.1  # of numbers of keys that count as equal


def begin(plan: Comparison, number: int = 1) -> None:
  """Checks a comparison, and creates its folder, which says what it compares.

  Raises ValueError or OSError if the folder holds something else, or a run
  cannot take place, see `check_runs`.
  """
  workdir.check_folder(plan.root, "config.json", "a run of train.py")
  own = dict(data=check_runs(plan, number))
  path, about = plan.root / workdir.COMPARISON, plan.about() | own
  if path.exists() and (old := atomic.read_json(path, dict)) != about:
    what = "other data" if old | own == about else "another comparison"
    raise ValueError(f"{path} is of {what}; use another --workdir")
  plan.root.mkdir(parents=True, exist_ok=True)
  atomic.write_json(path, about)


def check_runs(plan: Comparison, number: int = 1) -> list[dict]:
  """Checks the runs of a comparison as far as possible without training.

  `number` runs at the same time divide GPUs among them, see `share_machine`.
  Computes nothing on a GPU: JAX would then allocate most of its memory for this
  process, and the processes of the runs need it. Raises ValueError or OSError
  if a run is impossible, two choices stand for the same run or have different
  units, or keys differ and must not. Returns the digests of all data.
  """
  seen: dict[tuple, str] = {}  # different texts may give the same network
  sources: dict[tuple, data.Source] = {}  # equal data are read once
  keys: dict[str, float] = {}
  units: dict[str, str] = {}
  among = number if jax.default_backend() == "gpu" else 1
  devices = tuple(jax.devices()[: jax.device_count() // among])
  for trial in _distinct(plan):
    label, config = str(trial), trial.config
    given = config.data, config.model.task
    experiment = Experiment(config, devices, sources.get(given))
    source = sources[given] = experiment.source
    loop.check(experiment)
    for split in "validation", "test":
      _ = source.windows(split)[0]
    if config.train.init_from:  # its weights are loaded, on a CPU
      alone = config.replace(**{f"mesh.{x}": 1 for x in config.mesh.keys()})
      cpu = jax.devices("cpu")[0]
      warm_start.first_state(Experiment(alone, (cpu,), source))
    fields = schema.flatten(config).items()
    others = (x for x in fields if not x[0].startswith("attention."))
    if (other := seen.setdefault((experiment.model, *others), label)) != label:
      raise ValueError(
        f"--vary: {other} and {label} are the same; leave one out"
      )
    keys[label] = costs.keys_per_query(experiment.model)
    units[source.unit] = label
  if len(units) > 1:
    found = ", ".join(f"{unit} with {x}" for unit, x in units.items())
    raise ValueError(f"--vary: losses have different units: {found}")
  if plan.equal and max(keys.values()) > MAX_RATIO * min(keys.values()):
    found = ", ".join(f"{number:,.1f} with {x}" for x, number in keys.items())
    raise ValueError(
      f"--equal=keys: keys per query differ by more than 10 %: {found}"
    )
  return [source.digest() for source in sources.values()]


def _distinct(plan: Comparison) -> list[Trial]:
  """Runs that differ in more than their seed."""
  pairs = itertools.product(plan.choices, plan.candidates or [""])
  seed = plan.seeds[-1] + bool(plan.tuned)  # the highest in use
  final = [Trial(plan, *pair, seed) for pair in pairs]
  return final + plan.tuning * bool(plan.tune_budget)
