"""Trains a model under each choice of a setting, to the same budget.

python -m sparse_transformer.compare --config=configs/cifar10_small.py \\
  --vary=attention.pattern=dense,local,strided,fixed \\
  --budget=steps:500 --seeds=3 --workdir=runs/patterns

The budget is steps, seconds or flops of training each. Seconds are turned into
steps by the speed of the first ones, so that the learning rate decays in time;
compilation and evaluation do not count, so runs should have the machine to
themselves. Each run has its own process and its workdir, CHOICE/seedN; started
again, the command goes on where it was. Writes comparison.md, .json and .html
into --workdir.

Choices are separated by commas outside of brackets, or by semicolons.
"""

import ast
import json
import math
import multiprocessing
import os
import pathlib
import re
import resource
import signal
import statistics
import sys
import time
import zlib

import jax
from absl import flags
from ml_collections import ConfigDict

from sparse_transformer import atomic, cli, data
from sparse_transformer.figures import html as pages, plots
from sparse_transformer.training import (
  costs,
  evaluate,
  loop,
  metrics,
  signals as signals_lib,
)
from sparse_transformer.training.experiment import Experiment

BUDGETS = "steps", "seconds", "flops"
WARM, TIMED = 3, 10  # steps before the speed is measured, and that measure it


def parse_budget(text):
  """("steps", 500.0) from "steps:500"."""
  kind, _, amount = text.partition(":")
  try:
    amount = float(amount)
  except ValueError:
    amount = 0
  if kind not in BUDGETS or not 0 < amount < math.inf:
    raise ValueError(
      f"--budget={text} must be steps:N, seconds:N or flops:N, N above 0"
    )
  return kind, amount


def parse_vary(text, config):
  """(field, its values) from "attention.pattern=dense,local"."""
  field, _, words = text.partition("=")
  group, _, name = field.partition(".")
  if group not in config or name not in config[group]:
    raise ValueError(f"--vary={text}: --config has no field {field!r}")
  separator = r";" if ";" in words else r",(?![^()\[\]]*[)\]])"
  choices = [word.strip() for word in re.split(separator, words)]
  if not all(choices) or len({*choices}) < len(choices):
    raise ValueError(f"--vary={text} must give different values after {field}=")
  return field, choices


def with_values(config, **values):
  """A copy of the config with other fields, "group.field", from texts."""
  changed = ConfigDict(config.to_dict()).lock()
  for field, text in values.items():
    old = config
    for name in field.split("."):
      old = old[name]
    value = text
    if isinstance(text, str) and not isinstance(old, str):
      try:
        value = ast.literal_eval(text)
      except (ValueError, SyntaxError):
        raise ValueError(
          f"{field}={text} must be of type {type(old).__name__}"
        ) from None
    try:
      changed.update_from_flattened_dict({field: value})
    except (TypeError, ValueError) as error:
      raise ValueError(f"{field}={text}: {error}") from None
  return changed


def folder_name(choice):
  """A choice as the name of a folder."""
  name = re.sub(r"[^\w.=+-]+", "_", choice).strip("_")
  if name == choice:
    return name
  return f"{name}-{zlib.crc32(choice.encode()):08x}"  # or some would be alike


def count_steps(config, kind, amount):
  """How many steps the budget pays for, at least one."""
  if kind == "seconds":
    return max(1, int(amount / seconds_per_step(config)))
  if kind == "flops":
    return max(1, int(amount / flops_per_step(config)))
  return int(amount)


def flops_per_step(config):
  """Of the matmuls with weights and of the pairs of attention, recomputation
  in the backward pass not counted: see `costs.step`."""
  model = Experiment(config).model
  pairs = sum(p.pairs(model.length) for heads in model.patterns for p in heads)
  batch = config.train.batch_size
  attended = pairs * batch * costs.flops_per_pair(model)
  flops = costs.step(config, model, attended)["flops"]
  return flops["total"] - flops["recomputed"]


def seconds_per_step(config):
  """The median of some steps of a run that is thrown away."""
  experiment = Experiment(config)
  examples = experiment.source.examples("train")
  batches = data.batches(examples, config.train.batch_size, config.train.seed)
  state = jax.jit(experiment.init)()
  step = jax.jit(experiment.step, donate_argnums=0)
  times = []
  for i in range(WARM + TIMED):
    batch = jax.device_put(batches[i], experiment.batch_sharding)
    start = time.perf_counter()
    state, _ = jax.block_until_ready(step(state, batch))
    times.append(time.perf_counter() - start)
  return statistics.median(times[WARM:])


def run(config, workdir, kind, amount, split):
  """Trains and scores one run, and writes its result.json."""
  workdir = pathlib.Path(workdir)
  config = ConfigDict(config).lock()
  steps = workdir / "steps.json"
  if not steps.exists():
    # Once: a run that goes on must not find itself faster than it was.
    count = count_steps(config, kind, amount)
    workdir.mkdir(parents=True, exist_ok=True)
    atomic.write_text(steps, json.dumps(count))
  count = json.loads(steps.read_text())
  warmup = min(config.optimizer.warmup_steps, count // 10)
  config = with_values(
    config, **{"train.steps": count, "optimizer.warmup_steps": warmup}
  )
  state = loop.train(config, workdir)
  experiment = Experiment(config)
  score = evaluate.bits_per_dim(
    experiment.losses,
    state.ema,
    experiment.source.windows(split),
    batch_size=config.eval.batch_size,
    sharding=experiment.batch_sharding,
    name=split,
  )
  tokens = config.train.batch_size * experiment.source.length
  rates = [
    line["tokens_per_second"]
    for line in metrics.read(workdir)
    if "tokens_per_second" in line
  ]
  rate = statistics.median(rates) if rates else None
  result = score | dict(
    steps=count,
    seconds=rate and count * tokens / rate,
    tokens_per_second=rate,
    peak_bytes=peak_bytes(),
    flops=count * flops_per_step(config),
    unit=experiment.source.unit,
    split=split,
  )
  atomic.write_text(workdir / "result.json", json.dumps(result) + "\n")


def run_apart(config, workdir, *more):
  """`run` in a process of its own, to which a signal is handed on."""
  context = multiprocessing.get_context("spawn")
  inputs = config.to_dict(), str(workdir), *more
  process = context.Process(target=_run_here, args=inputs)
  with signals_lib.Signals() as signals:
    # A Ctrl-C is for the comparison alone, until the run looks out for one.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.start()
    signal.signal(signal.SIGINT, handler)
    while process.is_alive() and not signals.name:
      process.join(0.1)
    if process.is_alive():
      process.terminate()
      process.join()
  if signals.name:
    raise signals_lib.Stopped(
      f"{signals.name} in {workdir}, which keeps what it had; start the command"
      " again to go on"
    )
  if process.exitcode:
    raise OSError(
      f"the run in {workdir} ended with status {process.exitcode}; the others"
      " are kept, start the command again to go on"
    )


def _run_here(*inputs):
  os.setpgrp()  # out of reach of a Ctrl-C: it would be a second signal
  try:
    run(*inputs)
  except signals_lib.Stopped:
    sys.exit(cli.STOPPED)
  except cli.USER_ERRORS as error:
    sys.exit(str(error))


def peak_bytes():
  """The most memory: of the device where it says so, else of this process."""
  stats = jax.local_devices()[0].memory_stats() or {}
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == "darwin" else 1024
  return stats.get("peak_bytes_in_use", size * unit)


def run_all(config, root, field, choices, budget, seeds, split):
  """Does the runs that are not done yet: {choice: their results}."""
  results = {choice: [] for choice in choices}
  # Seed by seed: a stopped comparison is as far with all of its choices.
  for seed in range(seeds):
    for choice in choices:
      workdir = root / folder_name(choice) / f"seed{seed}"
      done = workdir / "result.json"
      if not done.exists():
        print(f"{field}={choice}, seed {seed}", flush=True)
        chosen = with_values(config, **{field: choice, "train.seed": seed})
        run_apart(chosen, workdir, *budget, split)
      results[choice].append(json.loads(done.read_text()))
  return results


def check_root(root, about):
  """Refuses a folder of another comparison."""
  path = root / "comparison-of.json"
  if path.exists() and (old := json.loads(path.read_text())) != about:
    differing = [k for k in about if about[k] != old.get(k)]
    raise ValueError(
      f"{root} holds another comparison: {', '.join(differing)} differ; use"
      " another --workdir"
    )
  root.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(about) + "\n")


def summarize(results):
  """A row for each choice: means over the seeds, and their deviation."""
  rows = []
  for choice, runs in results.items():

    def mean(field, runs=runs):
      values = [run[field] for run in runs if run[field] is not None]
      return statistics.fmean(values) if values else None

    bits = [run["bits_per_dim"] for run in runs]
    rows.append(
      dict(
        choice=choice,
        bits_per_dim=statistics.fmean(bits),
        deviation=statistics.stdev(bits) if len(bits) > 1 else None,
        seeds=len(runs),
        **{
          field: mean(field)
          for field in ("steps", "seconds", "tokens_per_second", "flops")
        },
        peak_bytes=max(run["peak_bytes"] for run in runs),
      )
    )
  return rows


def table(field, rows, unit):
  """The rows as cells, the first holds the titles."""

  def number(value, form):
    return "-" if value is None else form.format(value)

  lines = [
    (field, unit, "deviation", "steps", "seconds", "tokens/s", "peak", "FLOPs")
  ]
  for row in rows:
    lines.append(
      (
        row["choice"],
        f"{row['bits_per_dim']:.4f}",
        number(row["deviation"], "{:.4f}"),
        f"{row['steps']:,.0f}",
        number(row["seconds"], "{:,.0f}"),
        number(row["tokens_per_second"], "{:,.0f}"),
        f"{row['peak_bytes'] / 2**20:,.0f} MiB",
        f"{row['flops']:.3g}",
      )
    )
  return lines


def markdown(lines):
  first, *rest = ("| " + " | ".join(line) + " |" for line in lines)
  return "\n".join([first, "|---" * len(lines[0]) + "|", *rest]) + "\n"


def write(root, about, rows, unit):
  """comparison.json, .md and .html; the table as Markdown."""
  lines = table(about["field"], rows, unit)
  text = markdown(lines)
  (root / "comparison.json").write_text(
    json.dumps(dict(about=about, rows=rows), indent=1) + "\n"
  )
  (root / "comparison.md").write_text(text)
  runs = {
    choice: metrics.read(root / folder_name(choice) / "seed0")
    for choice in about["choices"]
  }
  kind, amount = about["budget"]
  title = f"{about['field']}, {amount:g} {kind} each"
  page = pages.page(
    title,
    pages.table(lines),
    pages.note(
      f"{about['split']} split, {about['seeds']} seeds; on {about['machine']}"
    ),
    pages.section(
      "Curves of the first seed",
      pages.figure(plots.curves(runs, unit), "bits by step"),
    ),
    pages.section(
      "Config", pages.preformatted(json.dumps(about["config"], indent=2))
    ),
  )
  (root / "comparison.html").write_text(page)
  return text


def machine():
  """The device, in words."""
  device = jax.local_devices()[0]
  if device.platform != "cpu":
    return f"{jax.local_device_count()} x {device.device_kind}"
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  text = cpuinfo.read_text() if cpuinfo.exists() else ""
  found = re.search(r"model name\s*: (.*)", text)
  return (
    f"{multiprocessing.cpu_count()} cores of {found[1] if found else 'CPU'}"
  )


def main(argv):
  cli.check_arguments(argv)
  args = flags.FLAGS
  cli.require("config", "vary", "workdir")
  if args.seeds < 1:
    raise ValueError(f"--seeds={args.seeds} must be at least 1")
  config, budget = args.config, parse_budget(args.budget)
  field, choices = parse_vary(args.vary, config)
  for choice in choices:  # a mistake is found before the first run
    chosen = Experiment(with_values(config, **{field: choice}))
    _ = chosen.model, chosen.source
  root = pathlib.Path(args.workdir)
  about = dict(
    field=field,
    choices=choices,
    budget=list(budget),
    seeds=args.seeds,
    split=args.split,
    machine=machine(),
    config=config.to_dict(),
  )
  about = json.loads(json.dumps(about))  # as it is read again
  check_root(root, about)
  results = run_all(
    config, root, field, choices, budget, args.seeds, args.split
  )
  unit = Experiment(config).source.unit
  print(write(root, about, summarize(results), unit))
  print(f"comparison in {root / 'comparison.html'}")


if __name__ == "__main__":
  flags.DEFINE_string("vary", None, "A field and its values: group.name=a,b,c")
  flags.DEFINE_string("budget", "steps:500", "steps:N, seconds:N or flops:N")
  flags.DEFINE_integer("seeds", 1, "Runs of each choice.")
  flags.DEFINE_enum(
    "split", "test", ("train", "validation", "test"), "What to score."
  )
  flags.DEFINE_string("workdir", None, "Folder of the comparison.")
  cli.run_on_config(main)
