"""What several test files share: tiny configs, commands in this process."""

import pathlib
import runpy
import sys

import grain  # noqa: F401  defines its flags now, not within a command
from absl import app, flags, logging

from configs import digits

REPO = pathlib.Path(__file__).parents[1]


def tiny(**changes):
  """Digits by a network that trains in no time: fields by "group.field"."""
  config = digits.get_config()
  settings = {
    "model.num_layers": 2,
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
  config.update_from_flattened_dict(settings)
  config.update_from_flattened_dict(changes)
  return config


def text(path, **changes):
  """`tiny` on the bytes of a file, in windows of 32."""
  return tiny(
    **{
      "data.name": "bytes",
      "data.path": str(path),
      "data.length": 32,
      "data.columns": 8,
      "data.fractions": (0.5, 0.25, 0.25),
    }
    | changes
  )


def command(script, *words):
  """Runs a script of the repository as `python SCRIPT WORDS`: its status."""
  values = flags.FLAGS
  app.define_help_flags()
  known, argv, verbosity = set(values), sys.argv, logging.get_verbosity()
  sys.argv = [script, *map(str, words)]
  try:
    runpy.run_path(str(REPO / script), run_name="__main__")
  except SystemExit as exit:
    return exit.code or 0
  finally:
    sys.argv = argv
    values.remove_flag_values(set(values) - known)
    values.unparse_flags()
    sys.modules.pop("config_config", None)  # or a next one would reuse it
    logging.set_verbosity(verbosity)
  raise AssertionError(f"{script} did not exit")


def files(folder):
  """All that lies below a folder: {path: contents}, None for a folder."""
  return {
    str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
    for path in sorted(folder.rglob("*"))
  }
