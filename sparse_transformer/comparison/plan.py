"""The plan of a comparison: its runs, and the config of each."""

import dataclasses
import functools
import json
import pathlib
import re
import zlib
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer import config as config_lib, machine, schema
from sparse_transformer.training import stopwatch

MAX_VALUES = 999  # of a flag, each with many runs
MAX_NAME = 200  # bytes in the name of a folder; most file systems allow 255
# A comma outside of brackets: those that close after it also open after it.
OUTSIDE = r",(?!(?:[^()\[\]]+|\([^()]*\))*+[)\]])"

Budget = tuple[str, float]  # what is limited, and to how much


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The runs of a comparison: each choice with each seed."""

  file: str  # the config file
  preset: ConfigDict  # what it says
  config: schema.Config  # the same with the changes of the command line
  root: pathlib.Path  # the comparison's folder
  field: str  # the field that varies, "group.name"
  choices: Sequence[str]  # its values
  budget: Budget  # the budget of each run
  seeds: range  # of the runs with each value; tuning uses the next one
  tuned: str = ""  # the field that is tuned for each choice, if there is one
  candidates: Sequence[str] = ()  # its values
  tune_budget: Budget | None = None  # of a run of tuning, if not the same
  equal: str | None = None  # "keys": runs must have about as many per query

  def __post_init__(self) -> None:
    varied = {x for y in self.choices for x in assignments(self.field, y)}
    if twice := {"train.steps", "train.seed"} & {*varied, self.tuned}:
      raise ValueError(
        f"{min(twice)} cannot vary: --budget sets train.steps, and --seeds"
        " train.seed"
      )
    if self.tuned in varied or len(self.candidates) == 1:
      raise ValueError(
        f"--tune={self.tuned} must have at least 2 values, and be another field"
        " than --vary"
      )
    if self.tune_budget and not self.tuned:
      raise ValueError("--tune_budget needs --tune")

  @property
  def tuning(self) -> list["Trial"]:
    """The runs with the next seed that find the best candidate of a choice."""
    return [Trial(self, x, y) for y in self.candidates for x in self.choices]

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


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run of a comparison: its folder, and what it is trained with."""

  plan: Comparison
  choice: str
  candidate: str = ""  # of the tuned field
  seed: int | None = None  # None for a run of tuning

  def __str__(self) -> str:
    """The values of the fields that vary."""
    text = f"{self.plan.field}={self.choice}"
    return text + f", {self.plan.tuned}={self.candidate}" * bool(self.candidate)

  @property
  def workdir(self) -> pathlib.Path:
    tuning = f"tune/{folder_name(self.candidate)}"
    name = tuning if self.seed is None else f"seed{self.seed}"
    return self.plan.root / folder_name(self.choice) / name

  @property
  def budget(self) -> Budget:
    tuning = self.plan.tune_budget if self.seed is None else None
    return tuning or self.plan.budget

  @functools.cached_property
  def config(self) -> schema.Config:
    """The config; at most a tenth of its steps warm up, unless that varies."""
    values = assignments(self.plan.field, self.choice)
    if self.candidate:
      values[self.plan.tuned] = self.candidate
    config = config_lib.with_texts(self.plan.config, values)
    kind, amount = self.budget
    steps = int(amount) if kind == "steps" else stopwatch.MOST - 1
    seed = self.plan.seeds.stop if self.seed is None else self.seed
    own = {"train.steps": steps, "train.seed": seed}
    if "optimizer.warmup_steps" not in values:
      warmup = min(config.optimizer.warmup_steps, steps // 10)
      own["optimizer.warmup_steps"] = warmup
    return config.replace(**own)


def parse_budget(text: str, flag: str = "budget") -> Budget:
  """Parses what is limited, and to how much; raises ValueError."""
  kind, amount = stopwatch.parse_limit(text, flag, ("steps", *stopwatch.TIMES))
  if kind == "steps" and amount % 1:
    raise ValueError(f"--{flag}={text}: steps must be an integer")
  return kind, amount


def parse_vary(text: str, flag: str = "vary") -> tuple[str, list[str]]:
  """The field and its values in 'group.field=value,value', or a ValueError."""
  field, _, values = text.partition("=")
  separator = ";" if ";" in values else OUTSIDE
  choices = [value.strip() for value in re.split(separator, values)]
  if not all(choices) or not len({*choices}) == len(choices) <= MAX_VALUES:
    raise ValueError(
      f"--{flag}={text[:MAX_NAME]} must give different values after {field}=,"
      f" at most {MAX_VALUES}"
    )
  for name in (x for y in choices for x in assignments(field, y)):
    schema.check_name(name)
  return field, choices


def assignments(field: str, choice: str) -> dict[str, str]:
  """The fields that a choice sets, each once, and their values.

  >>> assignments("attention.pattern", "dense with data.length=512")
  {'attention.pattern': 'dense', 'data.length': '512'}
  """
  value, _, others = choice.partition(" with ")
  pairs = [(field, value), *(x.partition("=")[::2] for x in others.split())]
  if len(found := dict(pairs)) < len(pairs):
    raise ValueError(f"{field}={choice} sets a field twice; leave one out")
  return found


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
