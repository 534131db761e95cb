"""Runs the trials of a comparison in processes, and reads their folders."""

import contextlib
import functools
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
from sparse_transformer.training.reports import receptive_field
from sparse_transformer.training.stopwatch import TIMES

# The split in the last line of metrics.jsonl. Whether a run has ended is read
# from its files only, so that a comparison can be resumed.
ENDED = "end"
DIVERGED = "diverged"
Parts = Sequence[jobs.MachinePart]


def run_all(trials: Sequence[Trial], parts: Parts) -> None:
  """Trains the runs that have not ended, and scores all on validation data.

  A tuning run may diverge. If any other run diverges, this is an error.

  Args:
    trials: the runs, in the order in which they start.
    parts: the parts of the machine, see `jobs.divide_machine`.

  Raises:
    ValueError: a folder contains a run with another config.
    OSError: a run failed.
  """
  tasks = []
  for trial in trials:
    if _ended_as(trial) == ENDED or _has_diverged(trial):
      continue  # if it is not scored yet, `score_all` does it

    flags = config_lib.overrides(trial.plan.preset, trial.config)
    kind, amount = trial.budget
    if kind in TIMES:
      flags.append(f"--limit={kind}:{amount}")

    # run.py trains and scores in one process, so that JAX starts only once.
    job = _job(trial, "train.py", flags)
    python, *rest = job.command
    tasks.append(
      job._replace(
        command=[python, run.__file__, *rest],
        is_failure=functools.partial(_has_failed, trial),
      )
    )

  jobs.call(tasks, parts)
  score_all(trials, "validation", parts)


def _has_diverged(trial):
  return trial.seed is None and _ended_as(trial) == DIVERGED


def _has_failed(trial):
  return not _has_diverged(trial)


def score_all(trials: Iterable[Trial], split: str, parts: Parts) -> None:
  """Scores the best checkpoints on a split, unless they are already scored."""
  tasks = []
  for trial in trials:
    if _ended_as(trial) == ENDED and not evaluation(trial, split):
      flags = [f"--split={split}", "--step=best"]
      tasks.append(_job(trial, "eval.py", flags, remark=f": {split}"))
  jobs.call(tasks, parts)


def _job(trial, script, flags, remark=""):
  """Returns a job that runs a script of the clone for a trial."""
  path = version.ROOT / script
  if not path.exists():  # the library was installed without the script
    raise FileNotFoundError(
      f"{path} is missing; run compare in a clone of the repository"
    )
  command = [sys.executable, str(path), f"--config={trial.plan.file}"]
  command += [f"--workdir={trial.workdir}", *flags]
  label = f"{trial}, seed {trial.config.train.seed}{remark}"
  return jobs.Job(label, trial.workdir, command)


def _ended_as(trial: Trial) -> str | None:
  """Returns the field `split` in the last line of metrics.jsonl, or None.

  Raises ValueError if the folder contains a run with another config.
  """
  if (trial.workdir / "config.json").exists():
    # The name of the folder reflects only the varied field, so check the
    # others.
    before = config_lib.read_config(trial.workdir)
    config_lib.compare(before, trial.config, (), trial.workdir)

  path = trial.workdir / "metrics.jsonl"
  lines = metrics.read(trial.workdir) if path.exists() else []
  return lines[-1]["split"] if lines else None


def evaluation(trial: Trial, split: str) -> dict[str, Any] | None:
  """Returns the score of a run's best checkpoint on a split.

  Returns:
    The fields of the file that eval.py wrote, or None if no file contains a
    score of this checkpoint with the default settings of a comparison.
  """
  # A user may have scored the run with other settings, which are not
  # comparable.
  expected = dict(split=split, min_context=0, weights="ema", dtype="float32")
  with contextlib.suppress(FileNotFoundError):  # checkpoints may be deleted
    expected["step"] = Saved(trial.workdir).find("best")

  results = []
  folder = trial.workdir / "evaluations"
  for path in sorted(folder.glob("*.json")):
    result = _read_score(path, expected)
    if result:
      results.append(result)
  # Without checkpoints, there may be scores of several steps. The lowest score
  # is that of the best checkpoint.
  best_first = lambda result: (result["bits_per_dim"], result["step"])
  return min(results, key=best_first, default=None)


def _read_score(path, expected):
  """Reads a score, or returns None if it is damaged or not the expected one."""
  try:
    result = atomic.read_json(path)

    is_finite = math.isfinite(result["bits_per_dim"])
    is_expected = expected.items() <= result.items()
    if is_finite and is_expected and not result.get("overrides"):
      return result
  except (ValueError, TypeError, KeyError, AttributeError):
    pass
  return None


def scored(trial: Trial, split: str) -> dict[str, Any] | None:
  """Returns the fields of `evaluation` that a record contains, or None."""
  result = evaluation(trial, split)
  if result is None:
    return None
  # Do not use `isinstance`, for which booleans are integers.
  return {k: v for k, v in result.items() if type(v) in (int, float)}


def collected(trial: Trial) -> record.Run:
  """Reads a run from its folder, and returns its entry in the record.

  Its `test` is None, because the test split is scored later.

  Raises ValueError or OSError if files of the run are damaged or missing.
  """
  lines = metrics.read(trial.workdir)
  network = Experiment(trial.config).model
  field = receptive_field.measure(network)
  curve = record.curve(lines)

  # Record the commit of the process that saved the checkpoint.
  validation: Any = evaluation(trial, "validation")
  saved = Saved(trial.workdir).describe(validation["step"])
  return dict(
    choice=trial.choice,
    seed=trial.seed,
    unit=validation["unit"],
    commit=saved.get("commit") or "unknown",
    steps=lines[-1]["step"],
    tokens_per_step=trial.config.train.batch_size * network.length,
    keys=costs.keys_per_query(network),
    receptive_field=field.symbols,
    sees=field.sees,
    parameters=count_parameters(network),
    peak_bytes=lines[-1]["peak_bytes"],
    **{time: curve[time][-1] for time in TIMES},  # the last step is validated
    best_step=validation["step"],
    validation=scored(trial, "validation"),
    test=None,
    curve=curve,
  )
