"""The runs of a comparison, as processes and as folders.

A run is `train.py`, then `eval.py`, and its result is what these have written
into its folder: config.json, metrics.jsonl and evaluations/*.json.
"""

import contextlib
import math
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer import atomic, config as config_lib
from sparse_transformer.comparison import jobs, record
from sparse_transformer.comparison.plan import Comparison, Trial
from sparse_transformer.model.transformer import count_parameters
from sparse_transformer.training import metrics
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.explanation import costs
from sparse_transformer.training.stopwatch import TIMES

SCRIPTS = pathlib.Path(__file__).parents[2]  # where train.py and eval.py are
OUTPUT = "output.txt"  # in the folder of a run: what its processes print
ENDED, DIVERGED = "end", "diverged"  # the last lines of metrics.jsonl
# What a record has of an evaluation.
SCORE = "bits_per_dim", "bits_per_byte", "standard_error", "examples", "tokens"
SCORE += "accuracy", "accuracy_error"  # type: ignore[assignment]
Shares = Sequence[jobs.Share]


def train_all(trials: Iterable[Trial], among: Shares) -> None:
  """Trains those that have not ended; of tuning, one may diverge."""
  tasks = []
  for trial in trials:
    may_diverge = [DIVERGED] * (trial.seed is None)
    is_done = lambda x=trial, also=may_diverge: last(x) in (ENDED, *also)
    if not is_done():
      words = train_words(trial.plan, trial.config, trial.workdir)
      if trial.budget[0] in TIMES:
        words.append("--limit={}:{}".format(*trial.budget))
      task = _job(trial, "", among, words)
      tasks.append(task._replace(is_failure=lambda x=is_done: not x()))
  jobs.call(tasks, among)


def score_all(trials: Iterable[Trial], split: str, among: Shares) -> None:
  """Scores the best checkpoints on a split, where that was not done yet."""
  tasks = []
  for trial in trials:
    if last(trial) == ENDED and not evaluation(trial, split):
      best = evaluation(trial, "validation") or {"step": "best"}
      words = [f"--workdir={trial.workdir}", f"--config={trial.plan.file}"]
      words += [f"--split={split}", f"--step={best['step']}"]
      tasks.append(_job(trial, f": {split}", among, ["eval.py", *words]))
  jobs.call(tasks, among)


def train_words(
  plan: Comparison, config: ConfigDict, workdir: pathlib.Path
) -> list[str]:
  """The words of a command that trains with a config, its script first."""
  words = config_lib.overrides(plan.preset, config)
  return ["train.py", f"--config={plan.file}", f"--workdir={workdir}", *words]


def script_command(words: Sequence[str]) -> list[str]:
  """The command that runs a script with some words."""
  path = SCRIPTS / words[0]
  if not path.exists():  # the library was installed without it
    raise FileNotFoundError(f"{path} is missing; compare runs it, in a clone")
  return [sys.executable, str(path), *words[1:]]


def _job(trial, remark, among, words):
  label = f"{trial}, seed {trial.config.train.seed}{remark}"
  output = trial.workdir / OUTPUT if len(among) > 1 else None
  return jobs.Job(label, trial.workdir, script_command(words), output)


def last(trial: Trial) -> str | None:
  """What the last line of a run's metrics is about; None if it has none.

  Raises:
    ValueError: the folder has a run with another config.
  """
  config_lib.check_config(trial.workdir, trial.config, free=())
  path = trial.workdir / "metrics.jsonl"
  lines = metrics.read(trial.workdir) if path.exists() else []
  return lines[-1]["split"] if lines else None


def evaluation(trial: Trial, split: str) -> dict[str, Any] | None:
  """The score of a run's best checkpoint on a split; None if there is none."""
  found = []
  about = dict(split=split, min_context=0, weights="ema", dtype="float32")
  if split != "validation":
    about["step"] = (evaluation(trial, "validation") or {}).get("step")
  for path in sorted((trial.workdir / "evaluations").glob("*.json")):
    with contextlib.suppress(ValueError, TypeError, KeyError):  # damaged
      result = atomic.read_json(path)
      is_own = about.items() <= result.items() and not result.get("overrides")
      if is_own and math.isfinite(result["bits_per_dim"]):
        found.append(result)
  order = lambda result: (result["bits_per_dim"], result["step"])
  return min(found, key=order, default=None)


def scored(trial: Trial, split: str) -> dict[str, Any] | None:
  """What a record has of an evaluation; None if there is none."""
  found = evaluation(trial, split)
  return {x: found[x] for x in SCORE if x in found} if found else None


def collected(trial: Trial) -> record.Run:
  """A run of the record, without its test, from its folder."""
  lines, experiment = metrics.read(trial.workdir), Experiment(trial.config)
  steps, curve = lines[-1]["step"], record.curve(lines)
  validation = evaluation(trial, "validation")
  if not (validation and curve["steps"]):
    raise ValueError(
      f"{trial.workdir} has no validation; delete it and run the same command"
      " to train the run again"
    )
  return dict(
    choice=trial.choice,
    seed=trial.seed,
    unit=validation["unit"],
    steps=steps,
    tokens_per_step=trial.config.train.batch_size * experiment.model.length,
    flops=flops(experiment, steps),
    keys=keys(experiment, steps),
    parameters=count_parameters(experiment.model),
    peak_bytes=lines[-1]["peak_bytes"],
    **{x: curve[x][-1] for x in TIMES},  # the last step is validated
    best_step=validation["step"],
    validation=scored(trial, "validation"),
    test=None,
    curve=curve,
  )


def keys(experiment: Experiment, steps: int) -> float:
  """Keys per query, the mean over the first steps of a run."""
  parts = experiment.steps_by_phase(steps)
  return sum(x * costs.keys_per_query(y.model) for x, y in parts) / steps


def flops(experiment: Experiment, steps: int) -> int:
  """FLOPs of the first steps of a run, without those of rematerialization."""
  total = 0
  for number, phase in experiment.steps_by_phase(steps):
    pairs = costs.count_pairs(phase.model)
    of_step = costs.step(phase.config, phase.model, pairs)["flops"]
    total += number * (of_step["weights"] + of_step["attention"])
  return total
