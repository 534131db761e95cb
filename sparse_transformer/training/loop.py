"""The training loop of a run."""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from sparse_transformer import (
  atomic,
  config as config_lib,
  data,
  machine,
  model as model_lib,
  schema,
  signals,
  tables,
)
from sparse_transformer.attention import registry
from sparse_transformer.figures.masks import save_patterns
from sparse_transformer.training import (
  announcements,
  cautions,
  metrics,
  optimizer,
  warm_start,
  workdir as workdir_lib,
)
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.distributed import mesh, processes
from sparse_transformer.training.evaluation import samples, scoring
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.explanation import costs
from sparse_transformer.training.hooks import (
  Profile,
  Progress,
  Samples,
  closing,
  is_due,
)
from sparse_transformer.training.monitor import Monitor
from sparse_transformer.training.step import State
from sparse_transformer.training.stopwatch import Limit, Stopwatch


@dataclasses.dataclass(frozen=True)
class Options:
  """How a run is trained, besides its config.

  Attributes:
    config_file: the file that the config was read from, of which the workdir
      gets a copy.
    limit: (a clock of `stopwatch.TIMES`, seconds) that ends a run of a single
      process before its last step. The learning rate then follows the clock, so
      that a resumed run is not the same bit for bit.
    allow_changes: whether the run may resume with other values of fields that
      affect what is in `config.CHANGEABLE`. It is then not the run that they
      give from the start.
    on_metrics: the first process calls it with (step, split, values) for each
      line that it writes to metrics.jsonl; an exception in it is reported.
    profile: consecutive steps, from 1, that the first process traces into the
      folder profile of the workdir.
  """

  config_file: str | os.PathLike | None = None
  limit: Limit | None = None
  allow_changes: bool = False
  on_metrics: metrics.OnMetrics | None = None
  profile: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class _Run:
  """What the parts of a run share while it trains."""

  experiment: Experiment
  options: Options
  stops: processes.Stops
  checkpoints: store.Checkpoints
  writer: metrics.Writer


def train(
  config: ConfigDict, workdir: str | os.PathLike, **settings: Any
) -> State:
  """Trains up to step `config.train.steps`, from the last checkpoint if any.

  Writes config.json, patterns.png, metrics.jsonl, events and checkpoints/ into
  the workdir; settings are those of `Options`. Returns the final state.

  Raises:
    ValueError: the config is invalid, does not fit the workdir, or needs more
      memory than is free.
    FloatingPointError: a loss or gradient is non-finite; `config.train` says
      when that ends a run.
    OSError: a file cannot be written.
    signals.Stopped: a signal ended the run after it saved its state.
  """
  workdir_lib.check_name(workdir)
  workdir, options = pathlib.Path(workdir), Options(**settings)
  with processes.Stops() as stops:
    # -- What is trained. Errors leave no workdir.
    experiment = processes.together(lambda: Experiment(config))
    config = experiment.config
    processes.together(lambda: check(experiment))
    free = _free_fields(workdir, options)
    changes = processes.decide(
      lambda: config_lib.check_config(workdir, config, free)
    )
    saved = processes.decide(lambda: store.Checkpoints(workdir).steps())
    if config.train.init_from and not saved:
      warm_start.first_state(experiment)  # raises before anything is compiled
    processes.decide(lambda: _introduce(experiment, workdir, options.limit))
    if max(saved, default=0) < config.train.steps:
      _compile(experiment, max(saved, default=0))

    # -- Its state and its files, its steps, its end.
    with (
      workdir_lib.hold(workdir),
      _checkpoints(experiment, workdir, free) as checkpoints,
    ):
      state, start = checkpoints.restore_last(experiment.like), None
      if state is None:
        state, start = warm_start.first_state(experiment)
      step = int(state.step)
      _check_step(config, workdir, step, changes)
      processes.decide(lambda: _write(experiment, workdir, step, free, options))
      silent = not processes.is_first()
      with metrics.Writer(workdir, step, silent, options.on_metrics) as writer:
        run = _Run(experiment, options, stops, checkpoints, writer)
        state = _steps(run, state, start)
        checkpoints.finish()
        if not stops.reason:  # the run is complete
          writer.note(int(state.step), "end", peak_bytes=machine.peak_memory())
  if stops.reason:
    raise signals.Stopped(
      f"{stops.reason} at step {int(state.step)}, which is saved; run the same"
      " command again to resume"
    )
  processes.decide(lambda: print(announcements.end(experiment, workdir)))
  return state


def _steps(run: _Run, state: State, start: Mapping | None) -> State:
  """Updates, logs, validates and saves, up to the last step or a signal."""
  experiment, writer, bits = run.experiment, run.writer, None
  config, first = experiment.config, int(state.step)
  lines = processes.decide(lambda: metrics.read(writer.workdir))
  _note(run, first, start, lines)
  watch = Stopwatch(lines, run.options.limit)
  monitor = Monitor(config.train, experiment.numbers, writer.note, lines)
  is_last = first == config.train.steps or watch.is_over()
  steps = None if run.options.limit else config.train.steps

  # A signal ends it. Kernels need the mesh in context.
  with (
    contextlib.suppress(signals.Stopped),
    jax.set_mesh(experiment.mesh),
    closing(
      Progress(first, steps),
      Profile(run.options.profile, first, writer, watch),
      Samples(experiment, writer, watch, run.stops),
    ) as hooks,
  ):
    validated = [x["step"] for x in lines if x["split"] == "validation"]
    interrupted = first > max(validated, default=0)
    if interrupted and is_due(first, config.eval.every, is_last):
      with watch.paused():
        bits = _validate(run, state, watch)
    for step in range(first, first if is_last else config.train.steps):
      run.stops.check()
      phase = experiment.at(step)
      if step and step in experiment.phases:
        _note_pattern(writer, step, phase)
      batch = experiment.batch(step)
      due = optimizer.due(config, step, watch.share())
      state, measured = phase.program(state, batch, due)
      done, bits = step + 1, None  # the step's number in metrics, checkpoints
      watch.count(len(batch) * phase.model.length)
      monitor.watch(done, measured)
      is_last = done == config.train.steps or watch.is_over()
      logs, validates, saves = _due(config, done, is_last)
      if logs or validates or saves:
        monitor.flush()
        with watch.paused():
          if logs:
            _log(writer, done, measured, phase, watch)
          if validates:
            bits = _validate(run, state, watch)
          if saves:
            run.checkpoints.save(state, bits)
      for hook in hooks:
        hook(done, state, is_last)
      if is_last:
        break
  monitor.flush()
  with watch.paused():
    run.checkpoints.save(state, bits)  # unless it is saved
    if run.stops.reason:
      writer.note(int(state.step), "stopped", **watch.times())
  return state


def _due(config: ConfigDict, step: int, is_last: bool) -> list[bool]:
  """Whether logging, validation and saving are due after a step."""
  every = config.train.log_every, config.eval.every, config.checkpoint.every
  return [is_due(step, number, is_last) for number in every]


def _free_fields(workdir: pathlib.Path, options: Options) -> set[str]:
  """The fields in which a config may differ from that in a workdir."""
  # Others are recorded beside config.json: without it, there are none.
  if options.allow_changes and (workdir / "config.json").exists():
    return config_lib.CHANGEABLE
  return config_lib.FREE


def check(experiment: Experiment) -> None:
  """Checks what a run needs from shapes, without training or writing anything.

  Raises:
    ValueError: the config is invalid in itself, or for these data or machine.
    OSError: the data cannot be read.
  """
  config, sizes = experiment.config, experiment.mesh.shape
  for phase in experiment.phases.values():
    if phase is not experiment:
      check(phase)
  mesh.check_batch(config, sizes)
  mesh.check_batch(config, sizes, "eval")
  if config.eval.samples:
    samples.decoder(experiment)
  mesh.check_network(experiment.model, sizes)
  state = costs.bytes_on_device(experiment.like, sizes)
  machine.check_free("the training state", state)
  with jax.set_mesh(experiment.mesh):
    params = experiment.like.params
    jax.eval_shape(experiment.losses, params, experiment.batch_shape)


def _introduce(experiment, workdir, limit):
  """Prints what to know about a run before it is compiled."""
  print(announcements.start(experiment, workdir, limit), flush=True)
  for phase in experiment.phases.values():
    cautions.report(phase.config, phase.model)
  case = costs.attention_case(experiment.config, experiment.model)
  chosen = registry.explain_choice(experiment.model.backend, case)
  print(f"attention by {chosen}", flush=True)


def _compile(experiment: Experiment, step: int) -> None:
  """Compiles what the steps from here on run, before the first of them.

  Raises:
    ValueError: it needs more memory than is free.
  """
  began, phases = time.perf_counter(), experiment.phases.items()
  later = [phase for first, phase in phases if first > step]
  processes.decide(lambda: print("compiling", flush=True))
  for phase in (experiment.at(step), *later):
    processes.together(functools.partial(getattr, phase, "program"))
  took = time.perf_counter() - began
  processes.decide(lambda: print(f"compiled in {took:.1f} s", flush=True))


def _checkpoints(experiment, workdir, free):
  """The checkpoints of a run; raises if processes have different ones."""
  config, source = experiment.config, experiment.source
  about = processes.together(lambda: store.about(config, source))
  fields = schema.flatten(config)
  fields.pop("data.path")  # each host may have its own copy
  data = {f"data ({name})": value for name, value in about["data"].items()}
  processes.check_same(fields | data | about["versions"])
  return store.Checkpoints(
    workdir,
    keep=config.checkpoint.keep,
    about=about,
    free=free,
  )


def _check_step(config, workdir, step, changes):
  """Raises ValueError if the run in a workdir cannot go on as it should."""
  if config.train.steps < step:
    raise ValueError(
      f"train.steps={config.train.steps} must be at least {step}, the step"
      f" that the run in {workdir} resumes from"
    )
  if config.train.steps == step:
    config_lib.check_finished(workdir, changes)


def _write(experiment, workdir, step, free, options):
  """Writes the config and a picture of the patterns."""
  model = experiment.model
  if step:
    print(f"resumes from step {step}", flush=True)
  config_lib.write_config(workdir, experiment.config, step, free)
  if options.config_file:  # what it registers is not in config.json
    source = pathlib.Path(options.config_file).read_bytes()
    atomic.write_bytes(workdir / "config.py", source)
  save_patterns(
    workdir / "patterns.png",
    model.patterns,
    model.shape,
    model.length,
  )


def _note(run, step, start, lines):
  """Writes what a run is, and what it starts from, if that is another one."""
  writer, experiment = run.writer, run.experiment
  config, model = experiment.config, experiment.model
  if start:
    writer.note(step, "start", **start)
    writer.say(announcements.origin(start))
  if model.experts and not any(line["split"] == "network" for line in lines):
    writer.note(
      step,
      "network",
      parameters=model_lib.count_parameters(model),
      active_parameters=model_lib.count_active_parameters(model),
      flops_per_token=costs.flops_per_token(config, model),
    )
  fields = [(name, str(x)) for name, x in schema.flatten(config).items()]
  table = tables.markdown([("field", "value"), *fields])
  writer.show(step, "train", "config", table)
  writer.show(step, "train", "patterns", writer.workdir / "patterns.png")


def _note_pattern(writer, step, phase):
  """Writes that a schedule changes the pattern after this step."""
  pattern = phase.config.attention.pattern
  writer.note(step + 1, "pattern", pattern=pattern)
  writer.say(f"after {step:,} steps: attention.pattern={pattern}")


def _log(writer, step, measured, phase, watch):
  """Writes the metrics of a step; nothing if one is non-finite."""
  if (values := _finite(measured)) is None:
    return  # it is noted as skipped, or the loss scale is too large
  flops = costs.flops_per_token(phase.config, phase.model)
  values |= costs.speed(watch.rate(), flops, phase.model.dtype)
  writer.write(step, "train", **values, **watch.times())


def _finite(measured: Mapping[str, jax.Array]) -> dict[str, Any] | None:
  """The values to log for a training step; None if one is non-finite."""
  values: dict[str, Any] = {}
  for name, x in ((name, np.float64(x)) for name, x in measured.items()):
    if not np.isfinite(x).all():
      return None
    # Digits of more numbers than one would fill the line.
    values[name] = x.round(4).tolist() if x.ndim else float(x)
  return values | dict(bits_per_dim=values["nats"] / math.log(2))


def _validate(run: _Run, state: State, watch: Stopwatch) -> float:
  """Logs and returns bits per dim of averaged weights on validation data."""
  experiment, step = run.experiment, int(state.step)
  settings = experiment.config.eval
  windows = experiment.source.windows("validation")
  num = min(settings.sequences or len(windows), len(windows))
  result = scoring.bits_per_dim(
    functools.partial(experiment.losses, state.ema),
    data.Lazy(num, windows.__getitem__),
    batch_size=settings.batch_size,
    sharding=experiment.batch_sharding,
    check_stop=run.stops.check,
  )
  bits = result["bits_per_dim"]
  if not math.isfinite(bits):
    run.writer.note(step, "diverged", metric="bits_per_dim", value=str(bits))
    raise FloatingPointError(
      f"validation bits_per_dim is {bits} at step {step}; the last checkpoint"
      " is from an earlier step"
    )
  values = {x: result[x] for x in ("bits_per_dim", "accuracy") if x in result}
  run.writer.write(step, "validation", **values, **watch.times())
  return bits
