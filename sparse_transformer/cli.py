"""Command lines: flags, config overrides, errors of one line."""

import functools
import pathlib
import re
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from sparse_transformer import config as config_lib
from sparse_transformer.training import signals

# What the user can mend. Anything else is our fault and keeps its traceback.
USER_ERRORS = (ValueError, OSError, FloatingPointError)
STOPPED = 130  # exit status after SIGINT or SIGTERM


def run(main, parse=flags.FLAGS):
  """Parses the flags, runs `main(argv)`, and exits.

  A mistake of the user's gives one line on standard error and exit status 1;
  --verbosity=1 shows where it was raised.
  """
  app.run(
    functools.partial(_report, main, USER_ERRORS),
    # A config file is a program: it may raise anything.
    flags_parser=functools.partial(_report, parse, Exception),
  )


def run_on_config(main):
  """`run` for a command on an experiment: --config names its file.

  Fields can be overridden: --config.attention.pattern=fixed.
  """
  config_flags.DEFINE_config_file(
    "config", None, "File with the experiment's config.", lock_config=True
  )
  run(main)


def run_on_workdir(main):
  """`run` for a command on a trained run: --config is that of its --workdir.

  Fields can be overridden: --config.attention.backend=dense.
  """
  flags.DEFINE_string("workdir", None, "Folder of the run.")
  run(main, parse=_parse_on_workdir)


def _parse_on_workdir(argv):
  flags.FLAGS(argv, known_only=True)
  if flags.FLAGS.workdir is None:
    raise ValueError("--workdir is missing; see --help")
  config = config_lib.read_config(flags.FLAGS.workdir)
  config_flags.DEFINE_config_dict(
    "config", config, "Of the run.", lock_config=True
  )
  flags.FLAGS.unparse_flags()
  return flags.FLAGS(argv)


def require(*names):
  """Refuses flags that are not set, and a --config that is no experiment."""
  for name in names:
    if flags.FLAGS[name].value is None:
      raise ValueError(f"--{name} is missing; see --help")
  config = flags.FLAGS.config
  if not all(hasattr(config, group) for group in config_lib.GROUPS):
    raise ValueError("--config must give the groups of configs/default.py")


def check_arguments(argv):
  """Refuses words on the command line that no flag took."""
  if len(argv) > 1:
    raise ValueError(
      f"unexpected argument {argv[1]!r}; settings are given as --name=value"
    )


def _report(function, errors, argv):
  # Orbax tells of every step it takes.
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  try:
    return function(argv)
  except errors as error:
    _fail(argv, error)
  except (KeyboardInterrupt, signals.Stopped) as error:
    line = f"stopped: {error}" if str(error) else "stopped"
    print(f"{pathlib.Path(argv[0]).name}: {line}", file=sys.stderr)
    sys.exit(STOPPED)


def _fail(argv, error):
  if flags.FLAGS.is_parsed() and logging.get_verbosity() >= logging.DEBUG:
    raise error
  line = re.sub(r"\s+", " ", _text(error)).strip()
  program = pathlib.Path(argv[0]).name
  print(f"{program}: {line or type(error).__name__}", file=sys.stderr)
  sys.exit(1)


def _text(error):
  if isinstance(error, (*USER_ERRORS, flags.Error)):
    return str(error)
  # What ml_collections raises for a wrong name of an override, by its depth.
  if len(error.args) == 1 and isinstance(error.args[0], KeyError):
    error = error.args[0]
  if isinstance(error, KeyError) and error.args:
    return f"--config has no field {error.args[0]}"
  return f"--config cannot be used: {type(error).__name__}: {error}"
