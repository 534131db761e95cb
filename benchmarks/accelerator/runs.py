"""Training: a short run, and a resumed run."""

import functools
import pathlib
import shutil
import subprocess
import sys
import tempfile

from benchmarks.accelerator.child import Settings
from benchmarks.record import REPO
from sparse_transformer.data import files
from sparse_transformer.training import metrics

NAME, MARGIN = "cifar10_large", 90  # seconds to compile and to validate
SMALL = "model.num_layers=2", "model.width=32"


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
