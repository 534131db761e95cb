"""Command lines: flags, overrides of config fields, one-line errors.

A command imports what it needs inside its `main`, so that a misspelt flag is
reported at once and not after the seconds that JAX takes to load.
"""

import functools
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from sparse_transformer import config as config_lib
from sparse_transformer.training import signals

# Errors that the user can fix. Any other is a bug and keeps its traceback.
USER_ERRORS = (ValueError, OSError, FloatingPointError)
STOPPED = 130  # exit status after SIGINT or SIGTERM


def run(
  main: Callable[[Sequence[str]], Any],
  parse: Callable[[Sequence[str]], Any] = flags.FLAGS,
) -> NoReturn:
  """Parses the flags, calls `main(argv)`, and exits.

  A user's mistake is reported as one line on standard error, with exit status
  1; --verbosity=1 shows where it was raised.

  Args:
    main: is called with the arguments that are not flags, the program first.
    parse: function from the command line to these arguments.
  """
  app.run(
    functools.partial(_call, main, USER_ERRORS),
    # A config file is a program: it may raise anything.
    flags_parser=functools.partial(_call, parse, Exception),
  )


def run_on_config(main: Callable[[Sequence[str]], Any]) -> NoReturn:
  """`run` for a command on an experiment, whose file --config names.

  Fields can be overridden: --config.attention.pattern=fixed.
  """
  config_flags.DEFINE_config_file(
    "config", None, "File with the experiment's config.", lock_config=True
  )
  run(main)


def run_on_workdir(main: Callable[[Sequence[str]], Any]) -> NoReturn:
  """`run` for a command on a trained run; --config is the one in --workdir.

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
    "config", config, "Config of the run.", lock_config=True
  )
  flags.FLAGS.unparse_flags()
  return flags.FLAGS(argv)


def require(*names: str) -> None:
  """Checks that flags are set and that --config is an experiment's.

  Raises:
    ValueError: if not.
  """
  for name in names:
    if flags.FLAGS[name].value is None:
      raise ValueError(f"--{name} is missing; see --help")
  config = flags.FLAGS.config
  missing = [group for group in config_lib.GROUPS if not hasattr(config, group)]
  if missing:
    raise ValueError(
      f"--config has no group {missing[0]!r}; its get_config must return the"
      " groups of configs/default.py"
    )


def check_arguments(argv: Sequence[str]) -> None:
  """Checks that the command line contains nothing but flags.

  Raises:
    ValueError: if it contains anything else.
  """
  if len(argv) > 1:
    raise ValueError(
      f"unexpected argument {argv[1]!r}; settings are given as --name=value"
    )


def _call(function, errors, argv):
  """function(argv); the given errors and signals end the process."""
  # Orbax logs every step it takes.
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  program = pathlib.Path(argv[0]).name
  try:
    return function(argv)
  except errors as error:
    if flags.FLAGS.is_parsed() and logging.get_verbosity() >= logging.DEBUG:
      raise
    line = re.sub(r"\s+", " ", _message(error)).strip()
    print(f"{program}: {line or type(error).__name__}", file=sys.stderr)
    sys.exit(1)
  except (KeyboardInterrupt, signals.Stopped) as error:
    line = f"stopped: {error}" if str(error) else "stopped"
    print(f"{program}: {line}", file=sys.stderr)
    sys.exit(STOPPED)


def _message(error):
  if isinstance(error, (*USER_ERRORS, flags.Error)):
    return str(error)
  # An override of an unknown field: depending on its depth, ml_collections
  # raises a KeyError or an error that contains one.
  if len(error.args) == 1 and isinstance(error.args[0], KeyError):
    error = error.args[0]
  if isinstance(error, KeyError) and error.args:
    return f"--config has no field {error.args[0]}"
  return f"--config cannot be used: {type(error).__name__}: {error}"
