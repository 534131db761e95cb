"""Training: steps of all configs, a short run, and a resumed run.

For each config, a training step is measured: its time, memory and utilization.
It uses the dtype of the config, and random tokens, so that no data are needed.
"""

import functools
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import numpy as np

from benchmarks import compiled, timing
from benchmarks.accelerator.child import Settings
from benchmarks.record import REPO
from sparse_transformer import machine
from sparse_transformer.data import files
from sparse_transformer.training import (
  costs,
  metrics,
  optimizer,
  rematerialization,
)
from sparse_transformer.training.experiment import Experiment

NAME, MARGIN = "cifar10_large", 90  # seconds to compile and to validate
SMALL = "model.num_layers=2", "model.width=32"
# The paper's networks are first. They are also measured without
# rematerialization, at the end.
PAPER = "enwik8", "cifar10", "cifar10_15m", "imagenet64"
ROUND_SECONDS = 1.0
SMALL_PRESET = "digits model.num_layers=2 train.batch_size=4 model.width=32"


def of_presets(settings: Settings) -> dict:
  """Returns an entry for each config, with the paper's networks first."""
  others = (f"{name} model.remat=none" for name in PAPER)
  presets = [*dict.fromkeys((*PAPER, *compiled.PRESETS)), *others]
  if settings.small:
    presets = [SMALL_PRESET]
  return {preset: functools.partial(measure, preset) for preset in presets}


def measure(preset: str) -> dict:
  """Returns the time and memory of a step of a `benchmarks.compiled` preset."""
  config = compiled.config_of(preset)
  config = config.replace(**compiled.changes_for(config, jax.device_count()))
  experiment = Experiment(config)
  model, like = experiment.model, experiment.batch_like()
  rng = np.random.default_rng(0)
  tokens_BL = rng.integers(model.vocab_size, size=like.shape, dtype=like.dtype)
  batch = jax.device_put(tokens_BL, like.sharding)
  # Create the state first, because the memory that is then free determines the
  # choice of `model.remat=auto`.
  state = experiment.first_state()
  chosen = rematerialization.choose(experiment)
  update = chosen.program
  schedule = optimizer.schedule(config)

  def step():  # waits only for the previous step
    nonlocal state
    state, _ = update(state, batch, schedule)
    return state

  warm = timing.warm_up(step)
  (times,) = timing.interleave({0: step}, {0: warm}, ROUND_SECONDS).values()
  size, peak = config.train.batch_size, machine.peak_memory()
  found = dict(batch=size, remat=chosen.remat, step=times, peak_bytes=peak)
  return found | costs.speed(size * model.length / times["median"], model)


def of_train(settings: Settings) -> dict:
  if settings.small:
    name, seconds, fields = "digits", 3.0, SMALL
  else:
    name, seconds = NAME, max(1.0, settings.seconds - MARGIN)
    fields = ("eval.sequences=256",)
  if settings.data:
    path = files.from_config(settings.data)
    has_arrays = path.suffix == ".npy" or any(path.glob("*.npy"))
    kind = "images" if has_arrays else "cifar10"
    fields = *fields, f"data.name={kind}", f"data.path={settings.data}"
  return {name: functools.partial(train, name, seconds, fields)}


def train(name: str, seconds: float, fields: tuple[str, ...]) -> dict:
  """Returns the curve of a run with a time limit."""
  with tempfile.TemporaryDirectory() as folder:
    lines = _train(name, folder, fields, f"--limit=seconds:{seconds:g}")
  shown = "step", "seconds", "bits_per_dim"
  steps = (x for x in lines if x["split"] == "train")
  *_, last = (x for x in lines if x["split"] == "validation")
  found = {"curve": [{x: line[x] for x in shown} for line in steps]}
  return found | {x: last[x] for x in ("step", "bits_per_dim")}


def of_resume(settings: Settings) -> dict:
  """Returns an entry that trains twice, and once from a checkpoint halfway."""
  fields = () if settings.small else ("model.dtype=bfloat16",)
  return {"digits": functools.partial(resume, (*SMALL, *fields))}


def resume(fields: tuple[str, ...], steps: int = 20) -> dict:
  fields += f"train.steps={steps}", f"checkpoint.every={steps // 2}"
  fields += "train.log_every=1", "checkpoint.keep=2"
  fields += ("optimizer.warmup_steps=5",)
  with tempfile.TemporaryDirectory() as folder:
    first, again, resumed = (pathlib.Path(folder) / x for x in "abc")
    expected = _losses(_train("digits", first, fields))
    same = _losses(_train("digits", again, fields)) == expected
    shutil.copytree(first, resumed)
    shutil.rmtree(resumed / "checkpoints" / f"{steps}")
    resumes = _losses(_train("digits", resumed, fields)) == expected
  if not same:
    return {"failed": f"losses of {steps} steps differed the second time"}
  if not resumes:
    return {"failed": "losses of a resumed run differed"}
  return {"steps": steps}


def _losses(lines):
  """Returns {step: loss} of a run; the last loss if a step was repeated."""
  return {x["step"]: x["nats"] for x in lines if x["split"] == "train"}


def _train(name, workdir, fields, *words):
  command = sys.executable, "train.py", f"--config=configs/{name}.py"
  fields = (f"--config.{field}" for field in ("eval.every=0", *fields))
  command = *command, f"--workdir={workdir}", *fields, *words
  done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
  if done.returncode:
    lines = done.stderr.strip().splitlines() or ["no message"]
    raise RuntimeError(lines[-1])
  return metrics.read(workdir)
