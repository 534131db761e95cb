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
  rules,
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
from sparse_transformer.training.analysis import costs, memory_limits
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.distributed import mesh, processes
from sparse_transformer.training.evaluation import drawing, scoring
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.monitor import Monitor
from sparse_transformer.training.step import State


def train(
  config: ConfigDict,
  workdir: str | os.PathLike,
  config_file: str | os.PathLike | None = None,
  limit: tuple[str, float] | None = None,
  allow_changes: bool = False,
  on_metrics: metrics.OnMetrics | None = None,
  profile: Sequence[int] = (),
) -> State:
  """Trains up to step `config.train.steps`, from the last checkpoint if any.

  A limit, (of `metrics.TIMES`, seconds), ends a run of a single process before
  that step, and the learning rate then follows the clock, so that a resumed run
  is not the same bit for bit.

  With `allow_changes`, a run may resume with other values of the fields of
  `config.CHANGEABLE`. It is then not the run that they give from the start.

  Writes config.json, patterns.png, metrics.jsonl, TensorBoard events and
  checkpoints/<step>/ into the workdir, and copies `config_file`, if given, from
  which the config was read. Returns the final state.

  The first process calls `on_metrics(step, split, values)` for each line that
  it writes to metrics.jsonl; an exception in it is reported, and the run goes
  on. It traces the consecutive steps of `profile` into the folder profile.

  Raises:
    ValueError: the config is invalid, or does not fit the workdir.
    FloatingPointError: a loss or gradient is non-finite; `config.train` says
      when that ends a run.
    signals.Stopped: a signal ended the run after it saved its state.
  """
  workdir_lib.check_name(workdir)
  experiment = processes.together(lambda: Experiment(config))
  processes.together(lambda: check(experiment))
  workdir = pathlib.Path(workdir)
  free: tuple[str, ...] = config_lib.FREE_FIELDS
  if allow_changes and (workdir / "config.json").exists():  # else unrecorded
    free += config_lib.CHANGEABLE
  changes = processes.decide(
    lambda: config_lib.check_config(workdir, config, free)
  )
  begin = functools.cache(lambda: warm_start.first_state(experiment))
  if processes.decide(lambda: not store.Checkpoints(workdir).steps()):
    begin()  # whose errors leave no workdir

  with (
    workdir_lib.hold(workdir),
    processes.Stops() as stops,
    store.Checkpoints(
      workdir,
      keep=config.checkpoint.keep,
      keep_best=config.checkpoint.keep_best,
      about=_same_everywhere(experiment),
      on_error=config.checkpoint.on_error,
      free=free,
    ) as checkpoints,
  ):
    state, start = checkpoints.restore_last(experiment.like), None
    if state is None:
      state, start = begin()
    step = int(state.step)
    if config.train.steps < step:
      raise ValueError(
        f"train.steps={config.train.steps} must be at least {step}, the step"
        f" that the run in {workdir} resumes from"
      )
    if step == config.train.steps:
      config_lib.check_finished(workdir, changes)
    if profile and profile[0] <= step:
      processes.decide(lambda: print(announcements.no_trace(profile, step)))
      profile = ()
    processes.decide(
      lambda: _describe(workdir, experiment, step, config_file, free, limit)
    )
    with metrics.Writer(
      workdir,
      step=step,
      steps=None if limit else config.train.steps,
      on_error=config.checkpoint.on_error,
      silent=not processes.is_first(),
      on_metrics=on_metrics,
    ) as writer:
      if start:
        writer.note(step, "start", **start)
        writer.say(announcements.origin(start))
      lines = processes.decide(lambda: metrics.read(workdir))
      fields = [(name, str(x)) for name, x in rules.flatten(config).items()]
      table = tables.markdown([("field", "value"), *fields])
      writer.show(step, "train", "config", table)
      writer.show(step, "train", "patterns", workdir / "patterns.png")
      state = _run(
        experiment, state, lines, writer, checkpoints, stops, limit, profile
      )
      checkpoints.finish()
      if not stops.reason:  # the run is complete
        writer.note(int(state.step), "end", peak_bytes=machine.peak_memory())
    if stops.reason:
      raise signals.Stopped(
        f"{stops.reason} at step {int(state.step)}, which is saved; run the"
        " same command again to resume"
      )
    processes.decide(lambda: print(announcements.end(experiment, workdir)))
  return state


def _same_everywhere(experiment: Experiment) -> dict[str, Any]:
  """The description of the run; raises if processes have different ones."""
  config, source = experiment.config, experiment.source
  about = processes.together(lambda: store.about(config, source))
  fields = rules.flatten(config)
  fields.pop("data.path")  # each host may have its own copy
  data = {f"data ({name})": value for name, value in about["data"].items()}
  processes.check_same(fields | data | about["versions"])
  return about


def _describe(workdir, experiment, step, config_file, free, limit):
  """Writes the config and a picture of the patterns; prints what to know."""
  config, model = experiment.config, experiment.model
  print(announcements.start(experiment, workdir, limit), flush=True)
  for phase in experiment.phases.values():
    cautions.report(phase.config, phase.model)
  if step:
    print(f"resumes from step {step}", flush=True)
  config_lib.write_config(workdir, config, step, free)
  if config_file:  # what it registers is not in config.json
    source = pathlib.Path(config_file).read_text()
    atomic.write_text(workdir / "config.py", source)
  save_patterns(
    workdir / "patterns.png",
    model.patterns,
    model.shape,
    model.length,
    first=model.prepends,
  )
  case = costs.attention_case(config, model)
  chosen = registry.explain_choice(model.backend, case)
  print(f"attention by {chosen}", flush=True)


def check(experiment: Experiment) -> None:
  """Checks all that a run needs, without training or writing anything.

  Raises:
    ValueError: the config is invalid in itself, or for these data or machine.
    OSError: the data cannot be read.
  """
  config, source = experiment.config, experiment.source
  for phase in experiment.phases.values():
    if phase is not experiment:
      check(phase)
  sizes = experiment.mesh.shape
  mesh.check_batch(config, sizes)
  mesh.check_batch(config, sizes, "eval")
  memory_limits.check_training(config, source)
  if config.eval.samples:
    drawing.decoder_in_training(experiment)
  mesh.check_network(experiment.model, sizes)
  # Not `batch`: the process that checks may leave devices to others.
  example = experiment.examples[0]
  shape = config.train.batch_size, *example.shape
  batch = jax.ShapeDtypeStruct(shape, example.dtype)
  with jax.set_mesh(experiment.mesh):
    jax.eval_shape(experiment.losses, experiment.like.params, batch)


def _run(
  experiment: Experiment,
  state: State,
  lines: Sequence[Mapping],
  writer: metrics.Writer,
  checkpoints: store.Checkpoints,
  stops: processes.Stops,
  limit: tuple[str, float] | None,
  profile: Sequence[int],
) -> State:
  """Updates, logs, validates and saves, up to the last step or a signal."""
  config, model = experiment.config, experiment.model
  first = int(state.step)
  phase, flops_per_token = None, 0.0
  if model.experts and not any(line["split"] == "network" for line in lines):
    writer.note(
      first,
      "network",
      parameters=model_lib.count_parameters(model),
      active_parameters=model_lib.count_active_parameters(model),
      flops_per_token=costs.flops_per_token(config, model),
    )
  monitor = Monitor(config.train, experiment.numbers, writer.note, lines)
  bits = None  # of the validation after the last step, if there was one
  watch = metrics.Stopwatch(lines)
  clock, seconds = limit or ("seconds", math.inf)
  share = watch.passed(clock) / seconds
  last = first if share >= 1 else config.train.steps
  traced = profile if processes.is_first() else ()

  # -- Loop; a signal ends it. Kernels need the mesh in context.
  with (
    contextlib.suppress(signals.Stopped),
    jax.set_mesh(experiment.mesh),
    contextlib.ExitStack() as trace,
  ):
    validated = [x["step"] for x in lines if x["split"] == "validation"]
    interrupted = first > max(validated, default=0)
    if interrupted and is_due(first, config.eval.every, last):
      bits = _validate(experiment, state, writer, stops, watch)
    for step in range(first, last):
      stops.check()
      if experiment.at(step) is not phase:
        phase = experiment.at(step)
        flops_per_token = costs.flops_per_token(config, phase.model)
        if step in experiment.phases and step:
          pattern = phase.config.attention.pattern
          writer.note(step + 1, "pattern", pattern=pattern)
          writer.say(f"after {step:,} steps: attention.pattern={pattern}")
        jax.block_until_ready(state)
        watch.stop()  # compilation does not count
      batch = experiment.batch(step)
      if limit:
        due = optimizer.timed_step(config, step, share)
        opt_state = optimizer.at_step(state.opt_state, due)
        state = dataclasses.replace(state, opt_state=opt_state)
      if watch.is_off:
        writer.say("compiling")
        began = time.perf_counter()
      if step + 1 in traced[:1]:
        folder = writer.workdir / "profile"
        profiler = jax.profiler.trace(folder, create_perfetto_trace=True)
        jax.block_until_ready(state)
        was_on = not watch.is_off
        watch.stop()
        trace.enter_context(profiler)
        if was_on:
          watch.restart()
      state, measured = phase.update(state, batch)
      bits = None
      done = step + 1  # the step's number in metrics and checkpoints
      writer.advance()
      watch.count(len(batch) * model.length)
      monitor.watch(done, measured)
      if watch.is_off:
        jax.block_until_ready(state)
        took = time.perf_counter() - began
        writer.say(f"compiled, and took the first step, in {took:.1f} s")
        watch.restart()  # compilation does not count
      if done in traced[-1:]:
        jax.block_until_ready(state)
        watch.stop()
        trace.close()
        writer.say(announcements.trace(traced, folder))
        watch.restart()
      share = watch.passed(clock) / seconds
      last = done if share >= 1 else last

      logs = is_due(done, config.train.log_every, last)
      validates = is_due(done, config.eval.every, last)
      saves = is_due(done, config.checkpoint.every, last)
      if logs or validates or saves:
        monitor.flush()
        watch.stop()
      if logs and (values := _finite(measured)):
        speed = costs.speed(watch.rate(), flops_per_token, model.dtype)
        writer.write(done, "train", **values, **speed, **watch.times())
        monitor.logged(values["nats"])
      if validates:
        bits = _validate(experiment, state, writer, stops, watch)
      if saves:
        checkpoints.save(state, bits)
      if validates and config.eval.samples:
        inputs = experiment, state.ema, writer.workdir, stops.check
        if shown := writer.attempt(drawing.draw_in_training, *inputs):
          writer.show(done, "validation", "samples", shown)
      if logs or validates or saves:
        watch.restart()
      if done == last:
        break

  # -- The end.
  monitor.flush()
  watch.stop()
  if last == 0 or stops.reason:
    checkpoints.save(state, bits)
  if stops.reason:
    writer.note(int(state.step), "stopped", **watch.times())
  return state


def is_due(step: int, every: int, last: int) -> bool:
  """Returns whether periodic work is due; it always is after the last step."""
  return step == last or (every > 0 and step % every == 0)


def replay(config: ConfigDict, workdir: str | os.PathLike, step: int) -> None:
  """Prints the loss of each example of a step; writes nothing.

  Uses the weights of the last checkpoint before it, else the initial ones.

  Raises:
    ValueError: the run has another config, or no such step.
    FileNotFoundError: the workdir holds no run.
  """
  experiment = Experiment(config)
  check(experiment)
  config_lib.read_config(workdir)  # raises if there is none
  config_lib.check_config(workdir, config)
  if step <= (change := config_lib.last_change(workdir)):
    raise ValueError(
      f"step {step} cannot be replayed: it is not after step {change}, when the"
      " run changed how it trains"
    )
  if not 1 <= step <= config.train.steps:
    raise ValueError(
      f"step {step} cannot be replayed: the run has steps 1 to"
      f" {config.train.steps}"
    )
  with store.Checkpoints(workdir) as checkpoints:
    if before := [s for s in checkpoints.steps() if s < step]:
      state = checkpoints.restore(experiment.like, before[-1])
    else:
      state, start = warm_start.first_state(experiment)
      lines = metrics.read(workdir)
      _check_start(start, [x for x in lines if x["split"] == "start"])
  numbers, batch = experiment.numbers[step - 1], experiment.batch(step - 1)
  weights_step = int(state.step)  # `update` reuses the memory of the state
  with jax.set_mesh(experiment.mesh):
    then = experiment.at(step - 1)
    nats_BL, *_ = jax.tree.leaves(then.losses(state.params, batch))
    _, measured = then.update(state, batch)
  nats_BL, symbols_BL = np.asarray(nats_BL), np.asarray(batch) >= 0
  if nats_BL.shape != symbols_BL.shape:  # a label each
    symbols_BL = np.ones(nats_BL.shape, bool)
  losses = nats_BL.mean(1, where=symbols_BL)
  print(f"step {step} with the weights of step {weights_step}:")
  for name, value in measured.items():
    if value.ndim == 0:
      print(f"  {name} {float(value):.6g}")
  for number, loss in zip(numbers, losses, strict=True):
    bits = f"{loss / math.log(2):.6g} {experiment.source.unit}"
    print(f"  example {number}: {bits}")


def _check_start(start, recorded):
  """Raises ValueError if a run started from other weights than it would now."""
  if start and recorded and start["crc32"] != recorded[-1]["crc32"]:
    raise ValueError(
      "the run cannot be replayed from its start: train.init_from now has other"
      f" weights (checksum {start['crc32']}) than it had"
      f" ({recorded[-1]['crc32']})"
    )


def _finite(measured: Mapping[str, jax.Array]) -> dict[str, Any] | None:
  """The values to log for a training step; None if one is non-finite."""
  values = {}
  for name, x in ((name, np.float64(x)) for name, x in measured.items()):
    if not np.isfinite(x).all():
      return None  # the monitor has logged it, or the loss scale is too large
    # Digits of more numbers than one would fill the line.
    values[name] = x.round(4).tolist() if x.ndim else float(x)
  return values | dict(bits_per_dim=values["nats"] / math.log(2))


def _validate(experiment, state, writer, stops, watch):
  """Logs and returns bits per dim of averaged weights on validation data."""
  settings, step = experiment.config.eval, int(state.step)
  windows = experiment.source.windows("validation")
  num = min(settings.sequences or len(windows), len(windows))
  result = scoring.bits_per_dim(
    experiment.losses,
    state.ema,
    data.Lazy(num, windows.__getitem__),
    batch_size=settings.batch_size,
    sharding=experiment.batch_sharding,
    name="validation",
    check_stop=stops.check,
  )
  bits = result["bits_per_dim"]
  if not math.isfinite(bits):
    writer.note(step, "diverged", metric="bits_per_dim", value=str(bits))
    raise FloatingPointError(
      f"validation bits_per_dim is {bits} at step {step}; the last checkpoint"
      " is from an earlier step"
    )
  values = {x: result[x] for x in ("bits_per_dim", "accuracy") if x in result}
  writer.write(step, "validation", **values, **watch.times())
  return bits
