"""Training: steps of the configs, some minutes of a network, and a resumed run.

Steps of the configs are on random tokens, so that no data are needed, in the
dtype of the config: their time, memory and utilization.
"""

import functools
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from benchmarks import compiled, timing
from benchmarks.accelerator.child import Settings
from benchmarks.record import REPO
from sparse_transformer import machine
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.explanation import costs

NAME, MARGIN = "cifar10_15m", 90  # seconds to compile and to validate
SMALL = "model.num_layers=2", "model.width=32"
POINTS = 60  # of a curve
# The paper's networks come first, and with other rematerialization last.
PAPER = "enwik8", "cifar10", "cifar10_15m", "imagenet64"
ROUND_SECONDS = 1.0
FIRST = np.int32(0)  # the step that the schedule is asked for
SMALL_PRESET = "digits model.num_layers=2 train.batch_size=4 model.width=32"


def of_presets(settings: Settings) -> dict:
  """One for each config, the paper's first, also without rematerialization."""
  if settings.small:
    return {"digits": functools.partial(measure, SMALL_PRESET)}
  names = [*PAPER, *(x for x in compiled.PRESETS if x not in PAPER)]
  found = {name: functools.partial(measure, name) for name in names}
  for name in PAPER:
    preset = f"{name} model.remat=none"
    found[f"{name}, remat none"] = functools.partial(measure, preset)
  return found


def measure(preset: str) -> dict:
  """The time and memory of a step of a preset of `benchmarks.compiled`."""
  config = compiled.config_of(preset)
  experiment = Experiment(config)
  model = experiment.model
  mesh.check_batch(config, experiment.mesh.shape)
  size, rng = (config.train.batch_size, model.length), np.random.default_rng(0)
  tokens_BL = rng.integers(model.vocab_size, size=size, dtype=np.uint8)
  batch = jax.device_put(tokens_BL, experiment.batch_sharding)
  start = time.perf_counter()
  with jax.set_mesh(experiment.mesh):
    update = experiment.update.lower(experiment.like, batch, FIRST).compile()
  plan = update.memory_analysis()
  needed = plan.argument_size_in_bytes + plan.output_size_in_bytes
  needed += plan.temp_size_in_bytes - plan.alias_size_in_bytes
  found = dict(batch=config.train.batch_size, dtype=model.dtype)
  found |= dict(remat=model.remat, compile_seconds=time.perf_counter() - start)
  found["compiled_bytes"] = needed
  memory = machine.free_memory()
  if memory and needed > memory:
    sizes = f"{needed / 2**30:.1f} of its {memory / 2**30:.1f} GiB"
    return found | {"skipped": f"a device needs {sizes}"}
  found["step"] = _time_steps(update, experiment.first_state(), batch)
  stats = jax.local_devices()[0].memory_stats() or {}
  found["peak_bytes"] = stats.get("peak_bytes_in_use")
  rate = tokens_BL.size / found["step"]["median"]
  return found | costs.speed(rate, model)


def _time_steps(update, state, batch):
  """Seconds of a step, which waits for the one before it only."""

  def step():
    nonlocal state
    state, _ = update(state, batch, FIRST)
    return state

  warm = timing.warm_up(step)
  return timing.interleave({0: step}, {0: warm}, least=ROUND_SECONDS)[0]


def of_train(settings: Settings) -> dict:
  if settings.small:
    name, seconds, fields = "digits", 3.0, SMALL
  else:
    name, seconds = NAME, max(0.0, settings.seconds - MARGIN)
    fields = ("eval.sequences=256",)
  if settings.data:
    kind = "images" if settings.data.endswith(".npy") else "cifar10"
    fields = *fields, f"data.name={kind}", f"data.path={settings.data}"
  return {name: functools.partial(train, name, seconds, fields)}


def train(name: str, seconds: float, fields: tuple[str, ...]) -> dict:
  """The curve of a run, whose learning rate follows the clock."""
  with tempfile.TemporaryDirectory() as folder:
    lines = _train(name, folder, fields, f"--limit=seconds:{seconds:g}")
  shown = "step", "seconds", "bits_per_dim"
  steps = (x for x in lines if x["split"] == "train")
  curve = [{x: line[x] for x in shown} for line in steps]
  *_, last = (x for x in lines if x["split"] == "validation")
  every = math.ceil(len(curve) / POINTS)
  found = {"seconds": seconds, "steps": last["step"], "curve": curve[::every]}
  return found | {"bits_per_dim": last["bits_per_dim"]}


def of_resume(settings: Settings) -> dict:
  """The same training twice, and once more from a checkpoint halfway."""
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
    return {"failed": f"{steps} steps gave other losses the second time"}
  if not resumes:
    return {"failed": "a resumed run gave other losses"}
  return {"steps": steps}


def _losses(lines):
  """{step: loss} of a run; of a step that was repeated, the later one."""
  return {x["step"]: x["nats"] for x in lines if x["split"] == "train"}


def _train(name, workdir, fields, *words):
  command = sys.executable, "train.py", f"--config=configs/{name}.py"
  fields = (f"--config.{field}" for field in ("eval.every=0", *fields))
  command = *command, f"--workdir={workdir}", *fields, *words
  done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
  if done.returncode:
    lines = done.stderr.strip().splitlines() or ["no message"]
    raise RuntimeError(lines[-1])
  text = (pathlib.Path(workdir) / "metrics.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]
