"""The runs of a comparison, in processes, and what their folders hold."""

import contextlib
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from sparse_transformer import atomic, config as config_lib, version
from sparse_transformer.comparison import jobs, record, run
from sparse_transformer.comparison.plan import Trial
from sparse_transformer.model.transformer import count_parameters
from sparse_transformer.training import costs, metrics
from sparse_transformer.training.checkpoints.store import Saved
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.stopwatch import TIMES

ENDED, DIVERGED = "end", "diverged"  # the last lines of metrics.jsonl
Shares = Sequence[jobs.Share]


def run_all(trials: Sequence[Trial], among: Shares) -> None:
  """Trains runs that have not ended, and scores them; tuning may diverge."""
  tasks = []
  for trial in trials:
    if _last(trial) == ENDED or _has_diverged(trial):
      continue  # `score_all` scores it where that was not done
    words = config_lib.overrides(trial.plan.preset, trial.config)
    if trial.budget[0] in TIMES:
      words.append("--limit={}:{}".format(*trial.budget))
    job = _job(trial, "", "train.py", words)
    fails = lambda x=trial: not _has_diverged(x)
    command = [job.command[0], run.__file__, *job.command[1:]]
    tasks.append(job._replace(command=command, is_failure=fails))
  jobs.call(tasks, among)
  score_all(trials, "validation", among)


def _has_diverged(trial):
  return trial.seed is None and _last(trial) == DIVERGED


def score_all(trials: Iterable[Trial], split: str, among: Shares) -> None:
  """Scores the best checkpoints on a split, where that was not done yet."""
  tasks = []
  for trial in trials:
    if _last(trial) == ENDED and not evaluation(trial, split):
      words = [f"--split={split}", "--step=best"]
      tasks.append(_job(trial, f": {split}", "eval.py", words))
  jobs.call(tasks, among)


def _job(trial, remark, script, words):
  path = version.ROOT / script
  if not path.exists():  # the library was installed without it
    raise FileNotFoundError(f"{path} is missing; run compare in a clone")
  label = f"{trial}, seed {trial.config.train.seed}{remark}"
  words = [f"--config={trial.plan.file}", f"--workdir={trial.workdir}", *words]
  return jobs.Job(label, trial.workdir, [sys.executable, str(path), *words])


def _last(trial: Trial) -> str | None:
  """What the last line of a run's metrics is about; None if it has none."""
  if (trial.workdir / "config.json").exists():
    before = config_lib.read_config(trial.workdir)
    config_lib.compare(before, trial.config, (), trial.workdir)
  path = trial.workdir / "metrics.jsonl"
  lines = metrics.read(trial.workdir) if path.exists() else []
  return lines[-1]["split"] if lines else None


def evaluation(trial: Trial, split: str) -> dict[str, Any] | None:
  """The score of a run's best checkpoint on a split; None if there is none."""
  found = []
  about = dict(split=split, min_context=0, weights="ema", dtype="float32")
  with contextlib.suppress(FileNotFoundError):  # they may be gone by now
    about["step"] = Saved(trial.workdir).find("best")
  for path in sorted((trial.workdir / "evaluations").glob("*.json")):
    with contextlib.suppress(ValueError, TypeError, KeyError):  # damaged
      result = atomic.read_json(path)
      is_own = about.items() <= result.items() and not result.get("overrides")
      if is_own and math.isfinite(result["bits_per_dim"]):
        found.append(result)
  return min(found, key=lambda x: (x["bits_per_dim"], x["step"]), default=None)


def scored(trial: Trial, split: str) -> dict[str, Any] | None:
  """The numbers of `evaluation`, for a record."""
  found = evaluation(trial, split)
  return found and {x: y for x, y in found.items() if type(y) in (int, float)}


def collected(trial: Trial) -> record.Run:
  """A run of the record, without its test, from its folder."""
  lines, experiment = metrics.read(trial.workdir), Experiment(trial.config)
  steps, curve = lines[-1]["step"], record.curve(lines)
  validation: Any = evaluation(trial, "validation")
  saved = Saved(trial.workdir).describe(validation["step"])
  return dict(
    choice=trial.choice,
    seed=trial.seed,
    unit=validation["unit"],
    commit=saved.get("commit") or "unknown",
    steps=steps,
    tokens_per_step=trial.config.train.batch_size * experiment.model.length,
    keys=costs.keys_per_query(experiment.model),
    parameters=count_parameters(experiment.model),
    peak_bytes=lines[-1]["peak_bytes"],
    **{x: curve[x][-1] for x in TIMES},  # the last step is validated
    best_step=validation["step"],
    validation=scored(trial, "validation"),
    test=None,
    curve=curve,
  )
