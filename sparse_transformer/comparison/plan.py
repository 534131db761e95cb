"""The plan of a comparison: its runs and their configs."""

import dataclasses
import functools
import itertools
import json
import pathlib
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from sparse_transformer import config as config_lib, machine, schema
from sparse_transformer.training import stopwatch

# Maximum number of values of a flag, each of which requires at least one run.
MAX_VALUES = 999
# Maximum number of bytes in the name of a folder. Most file systems allow 255.
MAX_NAME = 200
# A comma outside brackets: each bracket that closes after it also opens after
# it.
OUTSIDE = r",(?!(?:[^()\[\]]+|\([^()]*\))*+[)\]])"


class Budget(NamedTuple):
  """The limit of a run."""

  kind: str  # "steps", "seconds" or "processor_seconds"
  amount: float


class Axis(NamedTuple):
  """A config field and the values that it takes in a comparison."""

  field: str  # "group.name"
  values: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """The runs of a comparison: each value of an axis with each seed.

  Attributes:
    file: the config file.
    preset: the config defined by the file.
    config: the preset with the overrides of the command line.
    root: the folder of the comparison.
    vary: the field that is compared. Its values are called choices.
    budget: the budget of each run.
    seeds: the seeds of the runs with each choice. Tuning runs use the seed
      after the last of these.
    tune: the field that is tuned for each choice, or None. Its values are
      called candidates.
    tune_budget: the budget of each tuning run; if None, `budget`.
    equal_keys: whether runs must have approximately equally many keys per
      query.

  Raises:
    ValueError: the settings contradict each other.
  """

  file: str
  preset: ConfigDict
  config: schema.Config
  root: pathlib.Path
  vary: Axis
  budget: Budget
  seeds: range
  tune: Axis | None = None
  tune_budget: Budget | None = None
  equal_keys: bool = False

  def __post_init__(self) -> None:
    # A value may set further fields, as in "dense with data.length=512".
    varied: set[str] = set()
    for choice in self.vary.values:
      varied |= assignments(self.vary.field, choice).keys()
    tuned = {self.tune.field} if self.tune else set()

    if twice := {"train.steps", "train.seed"} & (varied | tuned):
      raise ValueError(
        f"{min(twice)} cannot be varied or tuned, because --budget sets"
        " train.steps and --seeds sets train.seed"
      )

    if self.tune and (tuned & varied or len(self.tune.values) == 1):
      raise ValueError(
        f"--tune={self.tune.field} must have at least 2 values, and must not be"
        " a field that --vary sets"
      )

    if self.tune_budget and not self.tune:
      raise ValueError("--tune_budget requires --tune")

  @property
  def choices(self) -> Sequence[str]:
    """The values that are compared."""
    return self.vary.values

  @property
  def tuning(self) -> list["Trial"]:
    """The tuning runs: each choice with each candidate.

    Tuning runs use a seed that no other run uses. Candidates are therefore not
    chosen by the same losses that are reported.
    """
    candidates = self.tune.values if self.tune else ()
    return [Trial(self, x, y) for y in candidates for x in self.choices]

  def final(self, best: Mapping[str, str]) -> list["Trial"]:
    """Returns the runs that are compared: each choice with each seed.

    Args:
      best: {choice: its best candidate}; empty without tuning.
    """
    # Run all choices with one seed before the next seed, so that a comparison
    # that is stopped has made equal progress with every choice.
    pairs = itertools.product(self.seeds, self.choices)
    return [
      Trial(
        plan=self,
        choice=choice,
        candidate=best.get(choice, ""),
        seed=seed,
      )
      for seed, choice in pairs
    ]

  def about(self) -> dict[str, Any]:
    """Returns what identifies this comparison, as JSON.

    This record is written to the folder of the comparison. A comparison is
    resumed only if it has the same record as the one in its folder.
    """
    identity = dict(
      field=self.vary.field,
      choices=self.choices,
      budget=self.budget,
      seeds=len(self.seeds),
      first_seed=self.seeds.start,
      tune=self.tune,
      tune_budget=self.tune_budget,
      machine=machine.machine(),
      config=self.config.to_dict(),
    )

    # Convert tuples to lists, as when the file is read.
    return json.loads(json.dumps(identity))


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run of a comparison: its folder and its config.

  Attributes:
    plan: the comparison.
    choice: the value of the field that is compared.
    candidate: the value of the tuned field; "" if no field is tuned.
    seed: the seed of the run; None for a tuning run.
  """

  plan: Comparison
  choice: str
  candidate: str = ""
  seed: int | None = None

  def __str__(self) -> str:
    """Returns the values of the fields that vary, as text."""
    text = f"{self.plan.vary.field}={self.choice}"
    if self.plan.tune and self.candidate:
      text += f", {self.plan.tune.field}={self.candidate}"
    return text

  @property
  def workdir(self) -> pathlib.Path:
    """The folder of the run."""
    folder = self.plan.root / folder_name(self.choice)
    if self.seed is None:
      return folder / "tune" / folder_name(self.candidate)
    return folder / f"seed{self.seed}"

  @property
  def budget(self) -> Budget:
    """The budget of the run."""
    # By default, tuning runs have the same budget as other runs.
    tuning = self.plan.tune_budget if self.seed is None else None
    return tuning or self.plan.budget

  @functools.cached_property
  def config(self) -> schema.Config:
    """The config of the plan with the budget, seed and values of this run.

    The warm-up takes at most a tenth of the steps, unless a value sets
    `optimizer.warmup_steps`.
    """
    values = assignments(self.plan.vary.field, self.choice)
    if self.plan.tune and self.candidate:
      values[self.plan.tune.field] = self.candidate
    config = config_lib.with_texts(self.plan.config, values)

    # If a clock ends the run, use more steps than the run can reach.
    kind, amount = self.budget
    steps = int(amount) if kind == "steps" else stopwatch.MOST - 1

    # If the warm-up took the whole budget, runs would never reach their peak
    # learning rate.
    warmup = config.optimizer.warmup_steps
    if "optimizer.warmup_steps" not in values:
      warmup = min(warmup, steps // 10)
    fields = {
      "train.steps": steps,
      "train.seed": self.plan.seeds.stop if self.seed is None else self.seed,
      "optimizer.warmup_steps": warmup,
    }
    return config.replace(**fields)


def parse_budget(text: str, flag: str) -> Budget:
  """Parses "KIND:N", for example "steps:500".

  Args:
    text: the value of a flag.
    flag: the name of the flag, for error messages.

  Raises:
    ValueError: the kind is unknown, or the number is not allowed.
  """
  kind, amount = stopwatch.parse_limit(text, flag, ("steps", *stopwatch.TIMES))
  if kind == "steps" and amount % 1:
    raise ValueError(f"--{flag}={text}: steps must be an integer")
  return Budget(kind, amount)


def parse_axis(text: str, flag: str) -> Axis:
  """Parses "group.field=value,value", the value of a flag.

  Values are separated by commas outside brackets. If there is a semicolon, they
  are separated by semicolons only.

  Args:
    text: a field and its values.
    flag: the name of the flag, for error messages.

  Raises:
    ValueError: a value is empty, two values are equal, there are too many
      values, or a field is unknown.
  """
  field, _, values = text.partition("=")
  separator = ";" if ";" in values else OUTSIDE
  choices = [value.strip() for value in re.split(separator, values)]

  # Equal values would share a folder, and empty values are usually typing
  # errors.
  are_different = all(choices) and len(set(choices)) == len(choices)
  if not are_different or len(choices) > MAX_VALUES:
    raise ValueError(
      f"--{flag}={text[:MAX_NAME]} must list distinct values after {field}=,"
      f" at most {MAX_VALUES}"
    )

  for choice in choices:
    for name in assignments(field, choice):
      schema.check_name(name)
  return Axis(field, choices)


def assignments(field: str, choice: str) -> dict[str, str]:
  """Returns {field: value} for the fields that a choice sets.

  >>> assignments("attention.pattern", "dense with data.length=512")
  {'attention.pattern': 'dense', 'data.length': '512'}

  Raises:
    ValueError: a field is set twice.
  """
  value, _, rest = choice.partition(" with ")
  values = {field: value}
  for word in rest.split():
    name, _, value = word.partition("=")
    if name in values:
      raise ValueError(f"{field}={choice} sets {name} twice; set it once")
    values[name] = value
  return values


def folder_name(choice: str) -> str:
  """Returns the name of a folder, which is different for each choice.

  >>> folder_name("local"), folder_name("Local(4) | Strided(4)")
  ('local', 'Local_4_Strided_4-14ae6e10')
  """
  # Replace characters that would have to be quoted in a shell.
  name = re.sub(r"[^\w.=+-]+", "_", choice).strip("_")
  if name == choice and name.strip(".") and len(name.encode()) <= MAX_NAME:
    return name

  # Different choices may result in the same name, so append a checksum. If the
  # cut splits a character of several bytes, drop the rest of it.
  name = name.encode()[:MAX_NAME].decode(errors="ignore")
  return f"{name}-{zlib.crc32(choice.encode()):08x}"
