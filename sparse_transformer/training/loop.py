"""The training loop of a run."""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from sparse_transformer import (
  atomic,
  config as config_lib,
  data,
  machine,
  schema,
  signals,
)
from sparse_transformer.attention import registry
from sparse_transformer.figures.masks import save_patterns
from sparse_transformer.progress import progress
from sparse_transformer.training import (
  banner,
  costs,
  kernel_check,
  metrics,
  optimizer,
  rematerialization,
  warm_start,
  workdir as workdir_lib,
)
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.distributed import mesh, processes
from sparse_transformer.training.evaluation import scoring
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.profile import Profile
from sparse_transformer.training.step import State
from sparse_transformer.training.stopwatch import Limit, Stopwatch

# Steps after a start that are always printed, regardless of `train.log_every`,
# because problems usually appear in the first minute, while the user watches.
EARLY = 1, 2, 5, 10, 20


@dataclasses.dataclass(frozen=True)
class _Run:
  """The objects that all training steps share, except program and state.

  Attributes:
    experiment: the experiment of the run.
    limit: the time limit of the run, or None.
    profile: the steps to trace.
    stops: reports whether a signal asked any process to stop.
    saver: saves checkpoints.
    writer: writes metrics.
    lines: the lines of metrics.jsonl before the first step of this process.
    changes: changes of the config since the checkpoint from which the run
      resumes.
  """

  experiment: Experiment
  limit: Limit | None
  profile: Sequence[int]
  stops: processes.Stops
  saver: store.Saver
  writer: metrics.Writer
  lines: list[dict[str, Any]]
  changes: config_lib.Changes


def train(
  config: schema.Config,
  workdir: str | os.PathLike,
  *,
  config_file: str | os.PathLike | None = None,
  limit: Limit | None = None,
  allow_changes: bool = False,
  on_metrics: metrics.OnMetrics | None = None,
  profile: Sequence[int] = (),
) -> State:
  """Trains a run up to step `config.train.steps`.

  If the workdir contains a checkpoint, the run resumes from the last one.
  Writes config.json, patterns.png, metrics.jsonl, events and checkpoints/ into
  the workdir.

  Args:
    config: the config of the experiment; may be a ConfigDict.
    workdir: the folder of the run.
    config_file: the file that defined the config, or None. The workdir gets a
      copy.
    limit: the time limit as (a clock of `stopwatch.TIMES`, seconds), or None.
      After this time, the run ends even before its last step. A limit requires
      a single process. With a limit, the learning rate depends on time, so a
      resumed run is not bitwise identical to an uninterrupted one.
    allow_changes: whether a resumed run may change the fields whose effects are
      in `config.WITH_ALLOW_CHANGES`, such as the learning rate. After such a
      change, the weights differ from the weights of a run that used the new
      values from the start.
    on_metrics: see `metrics.Writer`.
    profile: consecutive steps to trace, counted from 1, see `Profile`.

  Returns:
    The state after the last step.

  Raises:
    ValueError: the config is invalid, does not fit the workdir, or needs more
      memory than is free.
    FloatingPointError: a loss or gradient is non-finite. The weights keep their
      values from before that step.
    OSError: a file cannot be written.
    signals.Stopped: a signal ended the run after it saved its state.
  """
  workdir_lib.check_folder(workdir, workdir_lib.COMPARISON, "a comparison")
  workdir = pathlib.Path(workdir)
  allowed = config_lib.TO_RESUME
  if allow_changes:
    allowed = config_lib.WITH_ALLOW_CHANGES

  # From here on, signals are caught, so that a run stops only at a point from
  # which it can resume.
  with processes.Stops() as stops:
    # This must precede any use of devices, because the check of kernels may
    # fork a process.
    experiment = processes.together(
      lambda: kernel_check.avoid_wrong(Experiment(config))
    )
    processes.together(lambda: check(experiment))

    with (
      workdir_lib.hold(workdir),
      _saver(experiment, workdir) as saver,
    ):
      # Make all checks before compilation, which may take minutes.
      resumed = processes.decide(saver.set_damaged_aside)
      changes = processes.decide(
        lambda: _changes(experiment.config, saver, resumed, allowed)
      )
      if resumed is not None:
        state, start = saver.saved.restore(experiment.like, resumed), None
      else:
        state, start = warm_start.first_state(experiment)

      processes.decide(lambda: banner.introduce(experiment, workdir, limit))
      program = _compile(experiment, saver, resumed)
      with metrics.Writer(
        workdir,
        step=-1 if resumed is None else resumed,
        on_metrics=on_metrics,
      ) as writer:
        if resumed:
          processes.say(f"resumes from step {resumed}")
        # If an error occurs before the config is written, `workdir.hold`
        # removes the new workdir.
        processes.decide(
          lambda: write_run(
            experiment,
            workdir,
            config_file=config_file,
            step=resumed or 0,
            changes=changes,
          )
        )
        if start:
          writer.write(0, "start", **start)
          processes.say(banner.origin(start))
        run = _Run(
          experiment=experiment,
          limit=limit,
          profile=profile,
          stops=stops,
          saver=saver,
          writer=writer,
          lines=processes.decide(lambda: metrics.read(workdir)),
          changes=changes,
        )
        state = _steps(run, program, state)

  # Raise only now, when the lock is released and the last checkpoint is
  # complete, so that the user can run the same command again at once.
  if stops.reason:
    raise signals.Stopped(
      f"{stops.reason} at step {int(state.step)}, which is saved; run the same"
      " command again to resume"
    )
  processes.decide(lambda: print(banner.end(experiment, workdir, config_file)))
  return state


def check(experiment: Experiment) -> None:
  """Checks that a run can begin, without computing anything on a device.

  Raises ValueError or OSError if batches do not fit the mesh, data cannot be
  read, memory is too small, or attention cannot run.
  """
  config = experiment.config
  sizes = experiment.mesh.shape
  mesh.check_batch(config, sizes)
  mesh.check_batch(config, sizes, "eval")

  # This covers only the state. The memory that the step itself needs is known
  # only when it is compiled, see `_compile`.
  state = costs.bytes_on_device(experiment.like, sizes)
  machine.check_free("the training state", state)

  # Tracing raises the errors of attention without computing anything.
  batch = experiment.batch_like(experiment.examples[0].dtype)
  with jax.set_mesh(experiment.mesh):
    jax.eval_shape(experiment.losses, experiment.like.params, batch)


def write_run(
  experiment: Experiment,
  workdir: pathlib.Path,
  config_file: str | os.PathLike | None = None,
  step: int = 0,
  changes: config_lib.Changes | None = None,
) -> None:
  """Writes the files that describe a run: its config, a picture of patterns.

  Args:
    experiment: the experiment of the run.
    workdir: the folder of the run.
    config_file: the file that defined the config, or None. It is copied,
      because it may register patterns and data sources, which config.json
      cannot contain.
    step, changes: see `config.write_config`.
  """
  if config_file:
    source = pathlib.Path(config_file).read_bytes()
    atomic.write_bytes(workdir / "config.py", source)

  # A run does not need this picture, so an error, for example about fonts, does
  # not end the run.
  model = experiment.model
  with metrics.attempt("the picture of the patterns"):
    path = workdir / "patterns.png"
    save_patterns(path, model.patterns, model.shape, model.length)

  # Write the config last, because it is what makes the folder a run.
  config_lib.write_config(workdir, experiment.config, step, changes)


def _saver(experiment, workdir):
  """Returns the `Saver` of a run, after checking that all processes agree.

  Raises ValueError if processes differ in the config, the versions of packages,
  the data, or the kernels to avoid.
  """
  config = experiment.config
  provenance = processes.together(
    lambda: store.provenance(config, experiment.source)
  )

  # If processes differed in any of these, they would train different networks,
  # or wait for each other forever.
  identity = schema.flatten(config) | provenance["versions"]
  # The data may have a different path on each host; their checksums are
  # compared instead.
  identity.pop("data.path")
  for name, value in provenance["data"].items():
    identity[f"data ({name})"] = value
  for name in registry.avoided():
    identity[f"whether kernels ({name}) passed"] = False

  processes.check_same(identity)
  return store.Saver(
    workdir, keep=config.checkpoint.keep, provenance=provenance
  )


def _changes(config, saver, step, allowed):
  """Compares the config with the config of the run in the workdir, if any.

  Args:
    config: the config to train with.
    saver: the saver of the run.
    step: the step of the checkpoint to resume from, or None.
    allowed: the effects that changes may have, as a policy of `config`.

  Returns:
    {"group.field": (old, new)}, the changes since that checkpoint.

  Raises ValueError if the run cannot continue with this config, or its files
  are damaged.
  """
  saved = saver.saved
  workdir = saved.workdir

  # Both files are read again after compilation. Read them now as well, to
  # report damage early.
  config_lib.read_changes(workdir)
  if (workdir / "metrics.jsonl").exists():
    metrics.read(workdir)
  written = {}
  if (workdir / "config.json").exists():
    before = config_lib.read_config(workdir)
    written = config_lib.compare(before, config, allowed, workdir)

  # The config in the checkpoint is decisive, because config.json may have been
  # edited since, or belong to a later checkpoint that is lost.
  changes = {}
  if step is not None:
    place = f"checkpoint {saved.path(step)}"
    changes = config_lib.compare(saved.config(step), config, allowed, place)
    saved.check_data(step, saver.provenance["data"])

  step = step or 0
  if config.train.steps < step:
    raise ValueError(
      f"train.steps={config.train.steps} must be at least {step}, the step from"
      f" which the run in {workdir} resumes"
    )

  # If no step follows, config.json must not change, because the weights were
  # trained with the old config.
  names = _changing_results(written | changes)
  if names and config.train.steps == step:
    raise ValueError(
      f"{', '.join(names)} cannot change, because the run in {workdir} has no"
      " step left to train; increase train.steps, or use another --workdir"
    )

  # The run is about to train later steps again, with another config. Existing
  # scores of these steps would then be mistaken for scores of the new weights.
  for path in (workdir / "evaluations").glob("*-step*.json") if names else ():
    scored = re.search("-step([0-9]+)-", path.name)
    if scored and int(scored[1]) > step:
      raise ValueError(
        f"{path} is the score of a step that would be trained again with"
        " another config; move the file away"
      )

  return changes


def _changing_results(changes):
  """Returns the changed fields that affect results, as a list of names.

  A run may change other fields without --allow_changes, see `config.TO_RESUME`.
  """
  return [x for x in changes if schema.affects(x) not in config_lib.TO_RESUME]


def _compile(experiment, saver, step):
  """Compiles the training step, or returns None if no step is left.

  Args:
    experiment: the experiment of the run.
    saver: the saver of the run. Its checkpoints record what the step
      recomputes.
    step: the step of the checkpoint to resume from, or None.

  Raises ValueError if the step needs more memory than is free.
  """
  if (step or 0) >= experiment.config.train.steps:
    return None

  processes.say("compiling")
  began = time.perf_counter()
  dtype = experiment.examples[0].dtype
  kept = processes.decide(lambda: _kept_remat(saver.saved, step))
  program, remat, why = rematerialization.choose(experiment, dtype, kept=kept)
  saver.provenance["remat"] = remat

  # If XLA reports how much memory the program needs, a run that does not fit
  # ends here. Otherwise, an allocation would fail later, or the host would
  # swap.
  needed = rematerialization.needed(program)
  if needed is not None:
    processes.together(lambda: machine.check_free("a training step", needed))
  if why:
    processes.say(why)
  processes.say(f"compiled in {time.perf_counter() - began:.1f} s")
  return program


def _kept_remat(saved, step):
  """Returns what `model.remat=auto` chose for a checkpoint, or None.

  The choice is valid only on the machine that made it.
  """
  if step is None:
    return None

  about = saved.describe(step)
  is_here = about.get("machine") == machine.machine()
  was_chosen = saved.config(step).model.remat == "auto"
  return about.get("remat") if is_here and was_chosen else None


def _steps(run: _Run, program: Callable[..., Any], state: State) -> State:
  """Trains until the last step, the end of the limit, or a signal.

  Args:
    run: the objects that the steps share.
    program: the compiled step, see `Experiment.compile_step`, or None if no
      step is left.
    state: the state to start from; its memory is reused.

  Returns:
    The last state, which is saved.
  """
  experiment = run.experiment
  config = experiment.config
  step = first = int(state.step)
  # The validation loss of the current state, which is saved with it; None if
  # the state is not validated.
  bits = None
  watch = Stopwatch(run.lines, run.limit)
  monitor = metrics.Monitor(experiment.numbers, run.writer.write)

  # A signal ends this block but not the function, which saves the state below.
  # The mesh must be the context, because kernels may be traced here.
  with (
    contextlib.suppress(signals.Stopped),
    jax.set_mesh(experiment.mesh),
    progress(
      "step",
      total=None if run.limit else config.train.steps,
      done=first,
      silent=not processes.is_first(),
    ) as advance,
    Profile(
      steps=run.profile,
      step=first,
      workdir=run.writer.workdir,
      watch=watch,
    ) as profile,
  ):
    is_last = step == config.train.steps or watch.is_over()
    if _lacks_validation(run, step, is_last):
      with watch.paused():
        bits = _validate(run, state, watch)
        # The step is already saved; this adds the loss to its checkpoint.
        run.saver.save(state, bits)

    while not is_last:
      run.stops.check()
      profile.before(step + 1, state)

      # JAX returns before the step is computed, so the host reads the next
      # batch while devices compute. The code below must not wait for devices
      # unless it is necessary.
      batch = experiment.batch(step)
      due = optimizer.schedule(config, step, watch.share())
      state, measured = program(state, batch, due)
      # Metrics and checkpoints count completed steps, so the first step is 1.
      step += 1
      bits = None
      advance(1)
      watch.count(len(batch) * experiment.model.length)
      monitor.watch(step, measured)

      is_last = step == config.train.steps or watch.is_over()
      logs = _is_due(step, config.train.log_every, is_last)
      validates = _is_due(step, config.eval.every, is_last)
      saves = _is_due(step, config.checkpoint.every, is_last)

      if step - first in EARLY and not logs:
        if values := _finite(measured):
          processes.say(metrics.as_line(step, "train", values))

      # Only these wait for the step. Check its metrics first, so that a
      # non-finite state is never saved or validated.
      if logs or validates or saves:
        monitor.flush()
        with watch.paused():
          if logs:
            _log(run, step, measured, watch)
          if validates:
            bits = _validate(run, state, watch)
          if saves:
            run.saver.save(state, bits)

  # This runs at the end as well as after a signal. If the step is already
  # saved, `save` does nothing.
  monitor.flush()
  with watch.paused():
    run.saver.save(state, bits)
    run.saver.finish()

  # Record the peak of the whole run, because this process may have resumed
  # after the last step and trained nothing.
  peaks = [line.get("peak_bytes", 0) for line in run.lines]
  run.writer.write(
    int(state.step),
    "stopped" if run.stops.reason else "end",
    peak_bytes=max([machine.peak_memory(), *peaks]),
    **watch.times(),
  )
  return state


def _is_due(step, every, is_last):
  """Whether an action is due; if `every` is 0, only at the last step."""
  return is_last or (every > 0 and step % every == 0)


def _lacks_validation(run, step, is_last):
  """Whether the step from which a run resumes must still be validated.

  This happens if a signal interrupted its validation.
  """
  # If the config has changed, the weights belong to the old config, but their
  # score would be recorded under the new one.
  if _changing_results(run.changes):
    return False

  steps = [x["step"] for x in run.lines if x["split"] == "validation"]
  is_due = _is_due(step, run.experiment.config.eval.every, is_last)
  return is_due and step > max(steps, default=0)


def _log(run, step, measured, watch):
  """Writes a line of training metrics, unless one of them is non-finite."""
  values = _finite(measured)
  # `Monitor` accepted the step, so only the loss scale was too large. This is
  # not an error, because the next scale is smaller.
  if values is None:
    return

  values |= costs.speed(watch.rate(), run.experiment.model)
  run.writer.write(step, "train", **values, **watch.times())


def _finite(measured):
  """Returns the metrics of a step as JSON, or None if one is non-finite."""
  values = {name: np.float64(x) for name, x in measured.items()}
  if not all(np.isfinite(x).all() for x in values.values()):
    return None

  values["bits_per_dim"] = values["nats"] / math.log(2)
  # Round arrays, such as the spans of all heads, to keep the line short.
  short = lambda x: np.char.mod("%.4g", x).astype(float).tolist()
  return {k: short(x) if x.ndim else float(x) for k, x in values.items()}


def _validate(run: _Run, state: State, watch: Stopwatch) -> float:
  """Scores the averaged weights on validation data.

  Returns:
    The loss in bits per dim.

  Raises FloatingPointError if the loss is non-finite.
  """
  experiment = run.experiment
  settings = experiment.config.eval
  step = int(state.step)

  # Use the same sequences each time, so that validations can be compared.
  windows = experiment.source.windows("validation")
  num = min(settings.sequences or len(windows), len(windows))
  tally = scoring.score(
    functools.partial(experiment.losses, state.ema),
    data.Lazy(num, windows.__getitem__),
    batch_size=settings.batch_size,
    sharding=experiment.batch_sharding,
    check_stop=run.stops.check,
  )

  bits = tally.bits_per_dim
  assert bits is not None  # there is at least one window
  if not math.isfinite(bits):
    run.writer.write(step, "diverged", metric="bits_per_dim", value=str(bits))
    raise FloatingPointError(
      f"validation bits_per_dim is {bits} at step {step}; the last checkpoint"
      " is from an earlier step"
    )

  values = dict(bits_per_dim=bits)
  if tally.accuracy is not None:
    values["accuracy"] = tally.accuracy
  run.writer.write(step, "validation", **values, **watch.times())

  return bits
