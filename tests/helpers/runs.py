"""Helpers for several test files: tiny configs, commands in this process."""

import inspect
import json
import os
import pathlib
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grain  # noqa: F401  defines its flags now, not within a command
import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict

from configs import digits
from sparse_transformer import config as config_lib, schema
from sparse_transformer.training import metrics
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.experiment import Experiment

REPO = pathlib.Path(__file__).parents[2]
DIGITS = f"--config={REPO / 'configs' / 'digits.py'}"
# Patterns of two layers that follow the content.
CONTENT = "LSH(8, 4), Routing(4, 8)"


def tiny(**changes: Any) -> ConfigDict:
  """Digits with a network that trains in seconds; changes are "group.field"."""
  config = digits.get_config()
  settings = {
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.width": 16,
    "model.dropout": 0.0,
    "optimizer.warmup_steps": 1,
    "train.steps": 4,
    "train.batch_size": 8,
    "train.log_every": 1,
    "eval.every": 0,
    "eval.batch_size": 8,
    "eval.sequences": 8,
    "checkpoint.every": 2,
  }
  config.update_from_flattened_dict(settings | changes)
  return config


def text(path: pathlib.Path, **changes: Any) -> ConfigDict:
  """`tiny` on the bytes of a file, with windows of 32."""
  settings = {
    "data.name": "bytes",
    "data.path": str(path),
    "data.length": 32,
    "data.columns": 8,
    "data.fractions": (0.5, 0.25, 0.25),
  }
  return tiny(**settings | changes)


def flags_of(**changes: Any) -> list[str]:
  """The flags that make `tiny(**changes)` of the digits."""
  before = schema.flatten(digits.get_config())
  after = schema.flatten(tiny(**changes))
  return [
    f"--config.{name}={value}"
    for name, value in after.items()
    if value != before[name]
  ]


def untrained(
  workdir: pathlib.Path, config: ConfigDict, change: Callable = lambda x: x
) -> pathlib.Path:
  """Makes a run at its changed start, with what commands on a run read."""
  experiment = Experiment(config)
  config_lib.write_config(workdir, config)
  provenance = store.provenance(config, experiment.source)
  with store.Saver(workdir, keep=1, provenance=provenance) as saver:
    saver.save(change(jax.jit(experiment.init)()))
  return workdir


def on_devices(number: int, check: Callable, *arguments: str) -> None:
  """Calls a function of a test file in a process with several CPU devices."""
  path = pathlib.Path(inspect.getfile(check))
  program = f"import sys, {path.stem} as m; m.{check.__name__}(*sys.argv[1:])"
  subprocess.run(
    [sys.executable, "-c", program, *arguments],
    env=environment(number, path.parent),
    check=True,
    timeout=3600,
  )


def python(
  *words: Any, cwd: pathlib.Path = REPO, **variables: Any
) -> subprocess.CompletedProcess:
  """Runs `python WORDS` in another process; its output is in the result."""
  return subprocess.run(
    [sys.executable, *map(str, words)],
    cwd=cwd,
    env=os.environ | {name: str(value) for name, value in variables.items()},
    capture_output=True,
    text=True,
  )


def environment(devices: int, *folders: pathlib.Path) -> dict[str, str]:
  """Variables of a process with several CPU devices, and modules in folders."""
  flag = f"--xla_force_host_platform_device_count={devices}"
  return {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (*folders, REPO, REPO / "tests"))),
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}",
    "JAX_PLATFORMS": "cpu",
  }


def command(script: str, *words: Any) -> int:
  """Runs `python SCRIPT WORDS` in this process; returns its exit status."""
  values = flags.FLAGS
  app.define_help_flags()
  known = set(values)
  argv = sys.argv
  verbosity = logging.get_verbosity()
  sys.argv = [script, *map(str, words)]
  orig_argv = sys.orig_argv
  sys.orig_argv = ["python", *sys.argv]
  try:
    runpy.run_path(str(REPO / script), run_name="__main__")
  except SystemExit as exit:
    return exit.code or 0
  finally:
    sys.argv = argv
    sys.orig_argv = orig_argv
    values.remove_flag_values(set(values) - known)
    values.unparse_flags()
    sys.modules.pop("config_config", None)  # or the next one would reuse it
    logging.set_verbosity(verbosity)

  raise AssertionError(f"{script} did not exit")


def scores(capfd: Any, workdir: pathlib.Path, *words: str) -> list[dict]:
  """The lines that eval.py prints."""
  capfd.readouterr()
  assert command("eval.py", f"--workdir={workdir}", *words) == 0
  return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def report(workdir: pathlib.Path) -> str:
  """The page that report.py makes."""
  assert command("sparse_transformer/report.py", f"--workdir={workdir}") == 0
  return (workdir / "report.html").read_text()


def files(folder: pathlib.Path) -> dict[str, bytes | None]:
  """Returns {path: contents} of what is below a folder; None for folders."""
  return {
    str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
    for path in sorted(folder.rglob("*"))
  }


def arrays(tree: Any) -> list[tuple[np.dtype, bytes]]:
  """The type and the bytes of each array of a tree."""
  leaves = map(np.asarray, jax.tree.leaves(tree))
  return [(x.dtype, x.tobytes()) for x in leaves]


def without_speed(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """The metrics of a run, except its times, and where it stopped or ended."""
  speed = {"tokens_per_second", "model_flops_per_second", "mfu"}
  speed |= {*metrics.TIMES}
  return [
    {name: value for name, value in line.items() if name not in speed}
    for line in metrics.read(workdir)
    if line["split"] not in ("stopped", "end")
  ]
