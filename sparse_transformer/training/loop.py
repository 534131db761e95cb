"""The training loop of a run."""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import re
import time
from collections.abc import Sequence
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
  warm_start,
  workdir as workdir_lib,
)
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.distributed import mesh, processes
from sparse_transformer.training.evaluation import samples, scoring
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.profile import Profile
from sparse_transformer.training.step import State
from sparse_transformer.training.stopwatch import Limit, Stopwatch

EARLY = 1, 2, 5, 10, 20  # steps after a start, which are shown


@dataclasses.dataclass(frozen=True)
class Options:
  """How a run is trained, besides its config.

  Attributes:
    config_file: where the config was read from; the workdir gets a copy.
    limit: (a clock of `stopwatch.TIMES`, seconds) that ends a run of a single
      process before its last step. The learning rate then follows the clock, so
      that a resumed run is not the same bit for bit.
    allow_changes: whether the run may resume with other values of fields that
      affect what is in `config.TO_CHANGE`. It is then not the run that these
      values give from the start.
    on_metrics: see `metrics.Writer`.
    profile: consecutive steps, counted from 1, see `Profile`.
  """

  config_file: str | os.PathLike | None = None
  limit: Limit | None = None
  allow_changes: bool = False
  on_metrics: metrics.OnMetrics | None = None
  profile: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class _Run:
  experiment: Experiment
  options: Options
  stops: processes.Stops
  saver: store.Saver
  writer: metrics.Writer


def train(
  config: schema.Config, workdir: str | os.PathLike, **settings: Any
) -> State:
  """Trains up to step `config.train.steps`, from the last checkpoint if any.

  Writes config.json, patterns.png, metrics.jsonl, events and checkpoints/ into
  the workdir; returns the state. Also takes a ConfigDict; settings: `Options`.

  Raises:
    ValueError: the config is invalid, does not fit the workdir, or needs more
      memory than is free.
    FloatingPointError: a loss or gradient is non-finite; the weights are as
      before it.
    OSError: a file cannot be written.
    signals.Stopped: a signal ended the run after it saved its state.
  """
  workdir_lib.check_folder(workdir, workdir_lib.COMPARISON, "a comparison")
  workdir, options = pathlib.Path(workdir), Options(**settings)
  with processes.Stops() as stops:
    checked = lambda: kernel_check.avoid_wrong(Experiment(config))
    experiment = processes.together(checked)
    processes.together(lambda: check(experiment))
    with (
      workdir_lib.hold(workdir),
      _saver(experiment, workdir) as saver,
    ):
      # What can be refused is refused before anything is compiled.
      saved = processes.decide(saver.last_intact)
      if saved is not None:
        saver.saved.check_step(saved)
      changes = processes.decide(
        lambda: _changes(experiment.config, saver, saved, options)
      )
      if saved is not None:
        saver.saved.check_network(saved, experiment.like)
      elif experiment.config.train.init_from:
        warm_start.first_state(experiment)
      step, last = saved or 0, -1 if saved is None else saved
      _compile(experiment, workdir, options.limit, step)
      start = None
      if saved is not None:
        state = saver.saved.restore(experiment.like, saved)
      else:
        state, start = warm_start.first_state(experiment)
      write = lambda: _write(experiment, workdir, step, changes, options)
      silent = not processes.is_first()
      with metrics.Writer(workdir, last, silent, options.on_metrics) as writer:
        processes.decide(write)
        if start:
          writer.note(step, "start", **start)
          writer.say(banner.origin(start))
        run = _Run(experiment, options, stops, saver, writer)
        state = _steps(run, state, (start or {}).get("bits"))
  if stops.reason:
    raise signals.Stopped(
      f"{stops.reason} at step {int(state.step)}, which is saved; run the same"
      " command again to resume"
    )
  about = experiment, workdir, options.config_file
  processes.decide(lambda: print(banner.end(*about)))
  return state


def _steps(run: _Run, state: State, bits: float | None) -> State:
  """Trains from a state, with these bits on validation data, if known."""
  experiment, writer = run.experiment, run.writer
  config, first = experiment.config, int(state.step)
  lines = processes.decide(lambda: metrics.read(writer.workdir))
  watch = Stopwatch(lines, run.options.limit)
  monitor = metrics.Monitor(experiment.numbers, writer.note)
  is_last = first == config.train.steps or watch.is_over()
  every = config.train.log_every, config.eval.every, config.checkpoint.every
  total = None if run.options.limit else config.train.steps
  # A signal ends it. Kernels need the mesh in context.
  with (
    contextlib.suppress(signals.Stopped),
    jax.set_mesh(experiment.mesh),
    progress("step", total, first, not processes.is_first()) as advance,
    Profile(run.options.profile, first, writer, watch) as profile,
  ):
    if _lacks_validation(run, first, is_last, lines):
      with watch.paused():
        bits = _validate(run, state, watch)
        run.saver.save(state, bits)  # they are added to the saved step
    for step in range(first, first if is_last else config.train.steps):
      run.stops.check()
      profile.before(step + 1, state)
      batch = experiment.batch(step)
      schedule = optimizer.schedule(config, step, watch.share())
      state, measured = experiment.program(state, batch, schedule)
      done, bits = step + 1, None  # the step's number in metrics, checkpoints
      advance(1)
      watch.count(len(batch) * experiment.model.length)
      monitor.watch(done, measured)
      is_last = done == config.train.steps or watch.is_over()
      logs, validates, saves = (_is_due(done, x, is_last) for x in every)
      if done - first in EARLY and not logs and (now := _finite(measured)):
        writer.say(metrics.as_line(done, "train", now))
      if logs or validates or saves:
        monitor.flush()
        with watch.paused():
          if logs:
            _log(writer, done, measured, experiment, watch)
          if validates:
            bits = _validate(run, state, watch)
          if saves:
            run.saver.save(state, bits)
      if is_last:
        break
  monitor.flush()
  with watch.paused():
    run.saver.save(state, bits)  # unless it is saved
    run.saver.finish()
  # This process may have resumed after the last step, and trained nothing.
  peaks = machine.peak_memory(), *(x.get("peak_bytes", 0) for x in lines)
  split = "stopped" if run.stops.reason else "end"
  writer.note(int(state.step), split, peak_bytes=max(peaks), **watch.times())
  return state


def _lacks_validation(run, step, is_last, lines):
  """Whether the validation of a saved step was interrupted, and can be made."""
  config = run.experiment.config
  validated = [x["step"] for x in lines if x["split"] == "validation"]
  is_due = _is_due(step, config.eval.every, is_last)
  if not is_due or step <= max(validated, default=0):
    return False
  # A changed run would score it differently than the one that made it.
  saved = run.saver.saved
  changes = processes.decide(
    lambda: config_lib.compare(saved.config(step), config)
  )
  return not any(
    schema.affects(name) == "scores" or name == "eval.sequences"
    for name in changes
  )


def _is_due(step, every, is_last):
  return is_last or (every > 0 and step % every == 0)


def check(experiment: Experiment) -> None:
  """Raises ValueError or OSError if a run cannot begin; trains nothing."""
  config, sizes = experiment.config, experiment.mesh.shape
  mesh.check_batch(config, sizes)
  mesh.check_batch(config, sizes, "eval")
  if config.eval.samples:
    samples.decoder(experiment)
  state = costs.bytes_on_device(experiment.like, sizes)
  machine.check_free("the training state", state)
  batch = experiment.batch_like(experiment.examples[0].dtype)
  with jax.set_mesh(experiment.mesh):
    jax.eval_shape(experiment.losses, experiment.like.params, batch)


def _compile(experiment, workdir, limit, step):
  processes.decide(lambda: banner.introduce(experiment, workdir, limit))
  if step >= experiment.config.train.steps:
    return
  began = time.perf_counter()
  processes.decide(lambda: print("compiling", flush=True))
  processes.together(lambda: experiment.program)
  took = time.perf_counter() - began
  processes.decide(lambda: print(f"compiled in {took:.1f} s", flush=True))


def _saver(experiment, workdir):
  """What saves a run; raises if processes train different ones."""
  config, source = experiment.config, experiment.source
  provenance = processes.together(lambda: store.provenance(config, source))
  fields = schema.flatten(config)
  fields.pop("data.path")  # each host may have its own copy
  data = {f"data ({name})": value for name, value in provenance["data"].items()}
  avoided = {f"whether kernels ({x}) passed": False for x in registry.AVOIDED}
  processes.check_same(fields | data | provenance["versions"] | avoided)
  keep = config.checkpoint.keep
  return store.Saver(workdir, keep=keep, provenance=provenance)


def _changes(config, saver, last, options):
  """The settings that a run changes at its last checkpoint, if it has one."""
  saved, workdir = saver.saved, saver.saved.workdir
  config_lib.read_changes(workdir)
  if (workdir / "metrics.jsonl").exists():
    metrics.read(workdir)
  allowed = config_lib.TO_RESUME
  if options.allow_changes:
    allowed = config_lib.TO_CHANGE
  written, changes = {}, {}
  if (workdir / "config.json").exists():
    before = config_lib.read_config(workdir)
    written = config_lib.compare(before, config, allowed, workdir)
  if last is not None:  # config.json may be edited, or of a lost checkpoint
    place = f"checkpoint {saved.path(last)}"
    changes = config_lib.compare(saved.config(last), config, allowed, place)
    saved.check_data(last, saver.provenance["data"])
  step = last or 0
  if config.train.steps < step:
    raise ValueError(
      f"train.steps={config.train.steps} must be at least {step}, the step"
      f" that the run in {workdir} resumes from"
    )
  is_free = lambda name: schema.affects(name) in config_lib.TO_RESUME
  if not (names := [x for x in written | changes if not is_free(x)]):
    return changes
  if config.train.steps == step:
    raise ValueError(
      f"{', '.join(names)} cannot change: the run in {workdir} has no step left"
      " that would use it; set more train.steps, or use another --workdir"
    )
  for path in (workdir / "evaluations").glob("*-step*.json"):
    found = re.search("-step([0-9]+)-", path.name)
    if found and int(found[1]) > step:
      raise ValueError(f"{path} is of a step that would change; move it away")
  return changes


def _write(experiment, workdir, step, changes, options):
  model = experiment.model
  if step:
    print(f"resumes from step {step}", flush=True)
  config_lib.write_config(workdir, experiment.config, step, changes)
  if options.config_file:  # what it registers is not in config.json
    source = pathlib.Path(options.config_file).read_bytes()
    atomic.write_bytes(workdir / "config.py", source)
  with metrics.attempt("the picture of the patterns"):
    path = workdir / "patterns.png"
    save_patterns(path, model.patterns, model.shape, model.length)


def _log(writer, step, measured, experiment, watch):
  if (values := _finite(measured)) is None:
    return  # the loss scale is too large
  values |= costs.speed(watch.rate(), experiment.model)
  writer.write(step, "train", **values, **watch.times())


def _finite(measured):
  """The values to log for a training step; None if one is non-finite."""
  found = {name: np.float64(x) for name, x in measured.items()}
  if not all(np.isfinite(x).all() for x in found.values()):
    return None
  found["bits_per_dim"] = found["nats"] / math.log(2)
  # More digits of many numbers would fill the line.
  short = lambda x: np.char.mod("%.4g", x).astype(float).tolist()
  return {k: short(x) if x.ndim else float(x) for k, x in found.items()}


def _validate(run: _Run, state: State, watch: Stopwatch) -> float:
  """Bits per dim of averaged weights on validation data; also draws samples."""
  experiment, step = run.experiment, int(state.step)
  settings, check_stop = experiment.config.eval, run.stops.check
  windows = experiment.source.windows("validation")
  num = min(settings.sequences or len(windows), len(windows))
  tally = scoring.score(
    functools.partial(experiment.losses, state.ema),
    data.Lazy(num, windows.__getitem__),
    batch_size=settings.batch_size,
    sharding=experiment.batch_sharding,
    check_stop=check_stop,
  )
  bits = tally.bits_per_dim
  assert bits is not None  # there is a window
  if not math.isfinite(bits):
    run.writer.note(step, "diverged", metric="bits_per_dim", value=str(bits))
    raise FloatingPointError(
      f"validation bits_per_dim is {bits} at step {step}; the last checkpoint"
      " is from an earlier step"
    )
  values = dict(bits_per_dim=bits)
  if tally.accuracy is not None:
    values["accuracy"] = tally.accuracy
  run.writer.write(step, "validation", **values, **watch.times())
  if settings.samples:
    # The next step sees a signal.
    with contextlib.suppress(signals.Stopped), metrics.attempt("sampling"):
      shown = samples.draw_in_training(
        experiment, state, run.writer.workdir, check_stop
      )
      run.writer.show(step, "validation", "samples", shown)
  return bits
