"""What is checked before the first run of a comparison trains."""

import itertools
import os
import pathlib
import socket
import tempfile
from typing import Any

from sparse_transformer import atomic, data, schema
from sparse_transformer.comparison import jobs, trials
from sparse_transformer.comparison.plan import Comparison, Trial
from sparse_transformer.training import loop, workdir
from sparse_transformer.training.experiment import Experiment

MAX_RATIO = 1.1  # of numbers of keys that count as equal


def begin(plan: Comparison, among: trials.Shares) -> dict[str, Any]:
  """Checks a comparison, and creates its folder, which says what it compares.

  Returns `plan.about()` and the digest of each choice's data.

  Raises:
    ValueError: the folder holds a run or another comparison, or a run cannot
      take place, see `check_runs`.
    OSError: it is a file, or the data of a run cannot be read.
  """
  root = plan.root
  workdir.check_name(root)
  if root.exists() and not root.is_dir():
    raise NotADirectoryError(f"--workdir={root} is a file; name a folder")
  if (root / "config.json").exists():
    raise ValueError(f"{root} holds a run of train.py; use another --workdir")
  path, old = root / workdir.COMPARISON, None
  if path.exists() and not isinstance(old := atomic.read_json(path), dict):
    raise ValueError(f"{path} is damaged; delete it")
  about = plan.about() | dict(data=check_runs(plan))
  if old is not None:
    if differing := [name for name in about if old.get(name) != about[name]]:
      raise ValueError(
        f"{root} holds another comparison: in {path}, {', '.join(differing)}"
        " differ; use another --workdir"
      )
  _check_starts(plan, among)
  root.mkdir(parents=True, exist_ok=True)
  # Tasks of an array, which start together, must not write to the same file.
  own = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}")
  atomic.write_json(own, about)
  own.replace(path)
  return about


def check_runs(plan: Comparison) -> dict[str, Any]:
  """Checks the runs of a comparison as far as possible without training.

  Computes nothing on a device: JAX would then allocate most of a GPU's memory
  for this process, and the processes of the runs need it. Returns the digest of
  each choice's data.

  Raises:
    ValueError: a run is impossible, two choices stand for the same run or have
      different units, or keys differ and must not.
    OSError: the data of a run cannot be read.
  """
  seen: dict[tuple, str] = {}  # different texts may give the same network
  sources: dict[str, data.Source] = {}  # equal data are read once
  keys: dict[str, float] = {}
  units: dict[str, str] = {}
  digests = {}
  for trial in _distinct(plan):
    label, config = str(trial), trial.config
    settings = config.data.to_json(sort_keys=True) + config.model.task
    experiment = Experiment(config, shared=sources.get(settings))
    source = sources[settings] = experiment.source
    loop.check(experiment)
    for split in "validation", "test":
      _ = source.windows(split)[0]
    networks = ((step, x.model) for step, x in experiment.phases.items())
    others = (x for x in _fields(config) if not x[0].startswith("attention."))
    if (other := seen.setdefault((*networks, *others), label)) != label:
      raise ValueError(
        f"--vary: {other} and {label} are the same; leave one out"
      )
    keys[label] = trials.keys(experiment, config.train.steps)
    units[source.unit] = label
    digests[trial.choice] = source.digest()
  if len(units) > 1:
    found = ", ".join(f"{unit} with {x}" for unit, x in units.items())
    raise ValueError(f"--vary: losses have different units: {found}")
  if plan.equal and max(keys.values()) > MAX_RATIO * min(keys.values()):
    found = ", ".join(f"{number:,.1f} with {x}" for x, number in keys.items())
    raise ValueError(
      f"--equal=keys: keys per query differ by more than 10 %: {found}"
    )
  return digests


def _distinct(plan: Comparison) -> list[Trial]:
  """Runs that differ in more than their seed."""
  pairs = itertools.product(plan.choices, plan.candidates or [""])
  final = [Trial(plan, *pair, plan.seeds.start) for pair in pairs]
  return final + plan.tuning * bool(plan.tune_budget)


def _fields(config):
  return schema.flatten(config).items()


def _check_starts(plan, among):
  """Checks `train.init_from`, by runs without a step: they load the weights."""
  cases: dict[tuple, tuple] = {}
  for trial in _distinct(plan):
    config = trial.config.copy_and_resolve_references()
    config.train.update(steps=0, seed=0)
    config.attention.schedule = ""
    kind = (x for x in _fields(config) if not x[0].startswith("optimizer."))
    if config.train.init_from:
      cases.setdefault((*kind,), (f"{trial}: its start", config))
  with tempfile.TemporaryDirectory() as folder:
    tasks = []
    for number, (label, config) in enumerate(cases.values()):
      place = pathlib.Path(folder, str(number))
      command = trials.script_command(trials.train_words(plan, config, place))
      tasks.append(jobs.Job(label, place, command, place / trials.OUTPUT))
    jobs.call(tasks, among)
