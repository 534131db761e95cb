"""Runs of train.py: some minutes of the paper's network, and a resumed run."""

import functools
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile

from benchmarks.accelerator.child import Settings
from benchmarks.record import REPO

NAME, MARGIN = "cifar10_15m", 90  # seconds to compile and to validate
SMALL = "--config.model.num_layers=2", "--config.model.width=32"
POINTS = 60  # of a curve


def of_train(settings: Settings) -> dict:
  """Trains until the time of the part is over."""
  if settings.small:
    name, seconds, words = "digits", 3.0, SMALL
  else:
    name, seconds = NAME, max(0.0, settings.seconds - MARGIN)
    words = ("--config.eval.sequences=256",)
  if settings.data:
    kind = "images" if settings.data.endswith(".npy") else "cifar10"
    path = f"--config.data.path={settings.data}"
    words = *words, f"--config.data.name={kind}", path
  return {name: functools.partial(train, name, seconds, words)}


def train(name: str, seconds: float, words: tuple[str, ...]) -> dict:
  """The curve of a run, whose learning rate follows the clock."""
  with tempfile.TemporaryDirectory() as folder:
    limit = f"--limit=seconds:{seconds:g}", "--config.eval.every=0"
    lines = _train(name, folder, *limit, *words)
  curve = [
    {x: line[x] for x in ("step", "seconds", "bits_per_dim")}
    for line in lines
    if line["split"] == "train"
  ]
  *_, last = (x for x in lines if x["split"] == "validation")
  every = math.ceil(len(curve) / POINTS)
  found = {"seconds": seconds, "steps": last["step"], "curve": curve[::every]}
  return found | {"bits_per_dim": last["bits_per_dim"]}


def of_resume(settings: Settings) -> dict:
  """The same training twice, and once more from a checkpoint halfway."""
  words = () if settings.small else ("--config.model.dtype=bfloat16",)
  return {"digits": functools.partial(resume, (*SMALL, *words))}


def resume(words: tuple[str, ...], steps: int = 20) -> dict:
  words = *words, f"--config.train.steps={steps}", "--config.eval.every=0"
  words = *words, f"--config.checkpoint.every={steps // 2}"
  words = *words, "--config.train.log_every=1", "--config.checkpoint.keep=2"
  words = *words, "--config.optimizer.warmup_steps=5"
  with tempfile.TemporaryDirectory() as folder:
    first, again, resumed = (pathlib.Path(folder) / x for x in "abc")
    expected = _losses(_train("digits", first, *words))
    same = _losses(_train("digits", again, *words)) == expected
    shutil.copytree(first, resumed)
    shutil.rmtree(resumed / "checkpoints" / f"{steps}")
    resumes = _losses(_train("digits", resumed, *words)) == expected
  if not same:
    return {"failed": f"{steps} steps gave other losses the second time"}
  if not resumes:
    return {"failed": "a resumed run gave other losses"}
  return {"steps": steps}


def _losses(lines):
  """{step: loss} of a run; of a step that was repeated, the later one."""
  return {x["step"]: x["nats"] for x in lines if x["split"] == "train"}


def _train(name, workdir, *words):
  """The lines of metrics of a run."""
  command = sys.executable, "train.py", f"--config=configs/{name}.py"
  done = subprocess.run(
    [*command, f"--workdir={workdir}", *words],
    cwd=REPO,
    capture_output=True,
    text=True,
  )
  if done.returncode:
    lines = done.stderr.strip().splitlines() or ["no message"]
    raise RuntimeError(lines[-1])
  text = (pathlib.Path(workdir) / "metrics.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]
