"""The plan of a comparison: its runs, their configs, and checks of them."""

import ast
import dataclasses
import itertools
import json
import os
import pathlib
import re
import socket
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from sparse_transformer import atomic, data, machine, rules
from sparse_transformer.comparison import budget as budget_lib, record
from sparse_transformer.training import loop, metrics, workdir
from sparse_transformer.training.experiment import Experiment

# Fields that a comparison sets itself, and the flag that says how.
SET_BY = {"train.seed": "seeds", "train.steps": "budget"}
MAX_RATIO = 1.1  # of numbers of keys that count as equal
MAX_NAME = 200  # bytes in the name of a folder; most file systems allow 255
Devices = tuple[jax.Device, ...] | None
NOT_OF_TYPE = TypeError, ValueError, SyntaxError, MemoryError, RecursionError


@dataclasses.dataclass(frozen=True)
class Plan:
  """The runs of a comparison: each choice with each seed."""

  config: ConfigDict  # config of the experiment
  root: pathlib.Path  # the comparison's folder
  field: str  # the field that varies, "group.name"
  choices: list[str]  # its values
  budget: budget_lib.Budget  # the budget of each run
  seeds: range  # of the runs with each value; tuning uses the next one
  tuned: str = ""  # the field that is tuned for each choice, if there is one
  candidates: Sequence[str] = ("",)  # its values
  equal: str | None = None  # "keys": runs must have about as many per query
  tune_budget: budget_lib.Budget | None = None  # of a run of tuning, if shorter

  def budget_of(self, seed: int | None) -> budget_lib.Budget:
    """The budget of a run, of tuning if it has no seed."""
    return (self.tune_budget if seed is None else None) or self.budget

  def limit(self, seed: int | None) -> budget_lib.Budget | None:
    """The time that ends a run; None if its steps are known."""
    budget = self.budget_of(seed)
    return budget if budget[0] in metrics.TIMES else None

  def workdir(
    self, choice: str, candidate: str = "", seed: int | None = None
  ) -> pathlib.Path:
    """The folder of a run, of tuning if it has no seed."""
    tuning = f"tune/{folder_name(candidate)}"
    name = tuning if seed is None else f"seed{seed}"
    return self.root / folder_name(choice) / name

  def label(self, choice: str, candidate: str) -> str:
    """The values of a run."""
    more = f", {self.tuned}={candidate}" if self.tuned else ""
    return f"{self.field}={choice}{more}"

  def config_of(
    self, choice: str, candidate: str = "", seed: int | None = None
  ) -> ConfigDict:
    """The config of a run, of tuning if it has no seed.

    At most a tenth of its steps warm up, unless that is what varies.
    """
    budget = self.budget_of(seed)
    seed = self.seeds.stop if seed is None else seed
    values = assignments(self.field, choice) | {"train.seed": seed}
    values |= {self.tuned: candidate} if self.tuned else {}
    most = {"train.steps": budget_lib.LIMIT - 1}
    config = with_values(self.config, **values | most)
    config.train.steps = budget_lib.count_steps(config, budget)
    if "optimizer.warmup_steps" not in values:
      warmup_steps = min(
        config.optimizer.warmup_steps, config.train.steps // 10
      )
      config.optimizer.warmup_steps = warmup_steps
    return config

  def about(self) -> dict[str, Any]:
    """Distinguishes this comparison from others, as JSON."""
    about = dict(
      field=self.field,
      choices=self.choices,
      budget=self.budget,
      seeds=len(self.seeds),
      first_seed=self.seeds.start,
      tune=[self.tuned, self.candidates] if self.tuned else None,
      tune_budget=self.tune_budget,
      machine=machine.machine(),
      config=self.config.to_dict(),
    )
    return json.loads(json.dumps(about))


def parse_vary(
  text: str, config: ConfigDict, flag: str = "vary"
) -> tuple[str, list[str]]:
  """The field and its values in 'group.field=value,value'.

  Values are separated by commas outside brackets, or by semicolons. A value may
  set other fields too, see `assignments`.

  >>> from sparse_transformer.config import get_config
  >>> parse_vary("attention.pattern=dense,BigBird(8, 3)", get_config())
  ('attention.pattern', ['dense', 'BigBird(8, 3)'])

  Raises:
    ValueError: if the config has no such field, the comparison sets the field
      itself, or the values are not distinct.
  """
  field, _, values = text.partition("=")
  separator = r";" if ";" in values else r",(?![^()\[\]]*[)\]])"
  choices = [value.strip() for value in re.split(separator, values)]
  if not all(choices) or len({*choices}) < len(choices):
    raise ValueError(
      f"--{flag}={text} must give different values after {field}="
    )
  for name in dict.fromkeys(x for y in choices for x in assignments(field, y)):
    group, _, rest = name.partition(".")
    if group not in config or rest not in config[group]:
      raise ValueError(f"--{flag}={text}: --config has no field {name!r}")
    check_free(f"--{flag}={text}", name)
  return field, choices


def assignments(field: str, choice: str) -> dict[str, str]:
  """The fields that a choice sets, and their values.

  >>> assignments("attention.pattern", "dense with data.length=512")
  {'attention.pattern': 'dense', 'data.length': '512'}
  """
  value, _, others = choice.partition(" with ")
  pairs = (pair.partition("=")[::2] for pair in others.split())
  return {field: value} | dict(pairs)


def check_free(word: str, field: str) -> None:
  """Raises ValueError if a comparison sets the field that a word names."""
  if flag := SET_BY.get(field):
    raise ValueError(f"{word}: a comparison sets {field} itself; use --{flag}")


def with_values(config: ConfigDict, **values: object) -> ConfigDict:
  """A copy of the config in which fields, "group.field", have other values.

  A string is converted to the type of the field.

  Raises:
    ValueError: if a value is not of that type.
  """
  changed = ConfigDict(config.to_dict()).lock()
  for field, text in values.items():
    group, name = field.split(".")
    old, value = config[group][name], text
    try:
      if isinstance(text, str) and not isinstance(old, str):
        value = ast.literal_eval(text)
      changed.update_from_flattened_dict({field: value})
    except NOT_OF_TYPE:
      kind = type(old).__name__
      raise ValueError(f"{field}={text} must be of type {kind}") from None
  return changed


def folder_name(choice: str) -> str:
  """The name of a folder, a different one for each choice.

  >>> folder_name("local"), folder_name("Local(4) | Strided(4)")
  ('local', 'Local_4_Strided_4-14ae6e10')
  """
  name = re.sub(r"[^\w.=+-]+", "_", choice).strip("_")
  if name == choice and name.strip(".") and len(name.encode()) <= MAX_NAME:
    return name
  name = name.encode()[:MAX_NAME].decode(errors="ignore")
  return f"{name}-{zlib.crc32(choice.encode()):08x}"


def experiments(
  configs: Iterable[ConfigDict], devices: Devices = None
) -> Iterator[Experiment]:
  """The experiments of configs on devices; equal data are read once."""
  sources: dict[str, data.Source] = {}
  for config in configs:
    settings = config.data.to_json(sort_keys=True) + config.model.task
    experiment = Experiment(config, devices, sources.get(settings))
    sources[settings] = experiment.source
    yield experiment


def check(plan: Plan, devices: Devices = None) -> dict[str, Any]:
  """Checks the runs of a comparison as far as possible without training.

  Computes nothing on a device: JAX would then allocate most of a GPU's memory
  for this process, and the processes of the runs need it. Returns the digest of
  each choice's data. Each run will have as many devices as given; None for all.

  Raises:
    ValueError: a run is impossible, two choices stand for the same run or have
      different units, or keys differ and must not.
    OSError: the data of a run cannot be read.
  """
  fields = {x for y in plan.choices for x in assignments(plan.field, y)}
  fields |= {plan.tuned} - {""}
  seen: dict[tuple, str] = {}
  keys, digests = {}, {}
  units: dict[str, str] = {}
  cases = [*itertools.product(plan.choices, plan.candidates)]
  made = experiments([plan.config_of(*case) for case in cases], devices)
  for (choice, candidate), experiment in zip(cases, made, strict=True):
    loop.check(experiment)
    for split in "validation", "test":
      _ = experiment.source.windows(split)[0]
    # Different texts and settings may give the same patterns.
    values = rules.flatten(experiment.config)
    kind = (
      *((step, x.model) for step, x in experiment.phases.items()),
      *(values[x] for x in fields if not x.startswith("attention.")),
    )
    label = plan.label(choice, candidate)
    if (other := seen.setdefault(kind, label)) != label:
      raise ValueError(
        f"--vary: {other} and {label} are the same; leave one out"
      )
    keys[label] = budget_lib.keys(experiment)
    digests[choice] = experiment.source.digest()
    units.setdefault(experiment.source.unit, label)
  if len(units) > 1:
    found = ", ".join(f"{unit} with {x}" for unit, x in units.items())
    raise ValueError(f"--vary: losses have different units: {found}")
  if plan.equal and max(keys.values()) > MAX_RATIO * min(keys.values()):
    found = ", ".join(f"{number:,.1f} with {x}" for x, number in keys.items())
    raise ValueError(
      f"--equal=keys: keys per query differ by more than 10 %: {found}"
    )
  return digests


def begin(plan: Plan, devices: Devices = None) -> dict[str, Any]:
  """Checks a comparison, its folder first, and creates the folder.

  Returns `plan.about()`, which the folder records.

  Raises:
    ValueError: the folder holds a run or another comparison; see also `check`.
    OSError: it is a file, or the data of a run cannot be read.
  """
  root, about = plan.root, plan.about()
  workdir.check_name(root)
  if root.exists() and not root.is_dir():
    raise NotADirectoryError(f"--workdir={root} is a file; name a folder")
  if (root / "config.json").exists():
    raise ValueError(f"{root} holds a run of train.py; use another --workdir")
  old = None
  if (root / workdir.COMPARISON).exists():
    old = record.read_json(root / workdir.COMPARISON, "data", *about)
    if differing := [name for name in about if old[name] != about[name]]:
      raise ValueError(
        f"{root} holds another comparison: {', '.join(differing)} differ; use"
        " another --workdir"
      )
  digests = check(plan, devices)
  if old and old["data"] != digests:
    raise ValueError(
      f"{root} holds a comparison on other data; use the same data, or another"
      " --workdir"
    )
  about["data"] = digests
  root.mkdir(parents=True, exist_ok=True)
  # Tasks of an array, which start together, must not write to the same file.
  own = f"{workdir.COMPARISON}.{socket.gethostname()}-{os.getpid()}"
  atomic.write_json(root / own, about)
  (root / own).replace(root / workdir.COMPARISON)
  return about
