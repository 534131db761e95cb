"""Command lines: flags, overrides of config fields, one-line errors.

A command imports what it needs inside its `main`, so that a misspelt flag is
reported before JAX loads, which takes seconds. It imports this module first,
and `flags` from it, so that a missing library is reported in one line.
"""

import functools
import os
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from sparse_transformer import signals, version

try:
  from absl import app, flags, logging
  from ml_collections import ConfigDict, config_flags

  from sparse_transformer import config as config_lib, schema
except ModuleNotFoundError as error:
  if (line := version.missing(error)) is None:
    raise
  sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {line}")

# Errors that the user can fix. Any other is a bug and keeps its traceback.
USER_ERRORS = (ValueError, OSError, FloatingPointError)
# Errors that a setting causes more often than a bug, and what they mean.
LIMITS: dict[type[Exception], str] = {
  MemoryError: "out of memory; shorter sequences and smaller batches need less",
  RecursionError: "an expression, a config or a flag is too long or too deep",
  OverflowError: "a number is too large",
}
HELP = r"--?(help|helpshort|helpfull|helpxml|\?|only_check_flags)"
OVERRIDE, FIELD = r"--?(no)?config\.", r"\w+(\.\w+)*"
PATHS = r"--?(config|data_dir|out|prompt|workdir)"
# What XLA's compilers say of memory that belongs to a core, not to the device.
KERNEL_LIMIT = "(?i)shared memory|memory space [sv]mem"
TRACEBACK = "Traceback (most recent call last):\n"
MAX_LINE = 1500  # characters of an error that are shown


Main = Callable[[Sequence[str]], Any]


def run(main: Main, parse: Main = flags.FLAGS) -> NoReturn:
  """Parses the flags, calls `main(argv)`, and exits.

  A user's mistake is reported as one line on standard error, with exit status
  1; --verbosity=1 shows where it was raised.

  Args:
    main: is called with the arguments that are not flags, the program first.
    parse: finds these: `on_config`, `on_workdir`, `on_either`, or absl's.
  """
  app.run(
    functools.partial(_call, main, describe),
    flags_parser=functools.partial(
      _call, functools.partial(_parse, parse), _describe_parsing
    ),
  )


def on_config(argv: Sequence[str]) -> Sequence[str]:
  """Parses flags of a command on an experiment, whose file --config names.

  Fields can be overridden: --config.attention.pattern=fixed.
  """
  config_flags.DEFINE_config_file(
    "config",
    None,
    "File with the experiment's config. Its fields can be overridden:"
    " --config.attention.pattern=fixed. The fields and their defaults:\n"
    + "\n".join(
      f"{name}={default}: {about}" for name, default, about, _ in schema.table()
    ),
    lock_config=True,
  )
  _list_in_help("config")
  return flags.FLAGS(argv)


def on_workdir(argv: Sequence[str]) -> Sequence[str]:
  """Parses flags of a command on a trained run, whose config is --config.

  Fields can be overridden: --config.attention.backend=dense. Patterns and data
  sources that a config file registers are known with --config=FILE.
  """
  flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run. Fields of its config can be overridden:"
    " --config.attention.backend=dense. If the config file of the run registers"
    " patterns or data sources, also pass --config=FILE.",
  )
  _list_in_help("workdir")
  argv = _register(argv)
  flags.FLAGS(argv, known_only=True)
  _check_flags("workdir")
  config = ConfigDict(config_lib.read_config(flags.FLAGS.workdir).to_dict())
  config_flags.DEFINE_config_dict(
    "config", config, "Config of the run.", lock_config=True
  )
  flags.FLAGS.unparse_flags()
  return flags.FLAGS(argv)


def _register(argv):
  """Runs config files for what they register; returns the other words."""
  is_file = re.compile("(?s)--?config=(.+)").fullmatch
  for found in filter(None, map(is_file, argv)):
    runpy.run_path(found[1])
  argv = [word for word in argv if not is_file(word)]
  sys.argv[1:] = argv[1:]
  return argv


def on_either(argv: Sequence[str]) -> Sequence[str]:
  """`on_workdir` if --workdir is given, otherwise `on_config`."""
  is_workdir = re.compile(r"--?workdir(=.*)?", re.DOTALL).fullmatch
  if any(map(is_workdir, argv[1:])):
    return on_workdir(argv)
  flags.DEFINE_string("workdir", None, "Folder of a run, in place of --config.")
  _list_in_help("workdir")
  return on_config(argv)


def exact_config() -> schema.Config:
  """The run's config, its activations in float32 unless a flag sets them."""
  flag = flags.FLAGS["config"]
  if "model.dtype" in config_flags.get_override_values(flag):
    return schema.typed(flag.value)
  return config_lib.in_float32(flag.value)


def parse_step(word: str | None) -> int | Literal["best"] | None:
  """The step that --step names; None for the last.

  Raises:
    ValueError: it is none of these.
  """
  if word is None:
    return None
  if word == "best":
    return "best"
  try:
    return int(word)
  except ValueError:
    raise ValueError(f"--step={word} must be an integer, or best") from None


def _list_in_help(name):
  """Lists a flag that this module defines in the help of the command."""
  flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def require(*names: str) -> None:
  """Checks that flags are set, and the fields of --config.

  Raises:
    ValueError: a flag is missing or empty, or a field breaks its rule.
    OSError: the config file cannot be read.
  """
  _check_flags(*names)
  schema.typed(flags.FLAGS.config)


def _check_flags(*required):
  """Raises ValueError if a flag is required but missing, or is left empty."""
  for name in required:
    if not flags.FLAGS[name].present and flags.FLAGS[name].value is None:
      raise ValueError(f"--{name} is missing; see --help")
  for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
    if flag.present and flag.value in ("", []):
      raise ValueError(f"--{flag.name} is empty; see --help")


def check_arguments(argv: Sequence[str]) -> None:
  """Raises ValueError if the command line contains anything but flags."""
  if len(argv) > 1:
    raise ValueError(
      f"unexpected argument {argv[1]!r}; settings are given as --name=value"
    )


def _parse(parse, argv):
  """parse(argv); if a flag asks for help, prints it and exits with status 0."""
  # Help is shown whatever else is on the command line.
  if asked := [word for word in argv[1:] if re.fullmatch(HELP, word)]:
    try:
      parse([argv[0], *asked])
    except SystemExit:
      sys.exit(0)  # absl's status is 1
  for name in (word.partition("=")[0] for word in argv[1:]):
    if re.match(OVERRIDE, name) and not re.fullmatch(OVERRIDE + FIELD, name):
      raise ValueError(
        f"{name} names no field; one is set by --config.group.name=value"
      )
  # ml_collections looks for overrides in sys.argv.
  sys.argv[1:] = _with_paths(argv[1:])
  argv = [argv[0], *sys.argv[1:]]
  # ml_collections warns of a config that is None, which `require` rejects.
  logging.set_verbosity(logging.ERROR)
  arguments = parse(argv)
  _check_flags()
  return arguments


def _with_paths(words):
  """The words; those that name paths as --name=path, with ~ written out."""
  found: list[str] = []
  words = iter(words)
  for word in words:
    if word == "--":  # no flags follow
      return [*found, word, *words]
    name, equals, path = word.partition("=")
    if re.fullmatch(PATHS, name):
      if not equals and (path := next(words, None)) is None:
        return [*found, word]  # absl reports the missing path
      word = f"{name}={_expand(name, path)}"
    found.append(word)
  return found


def _expand(name, path):
  """The path that a flag names, with ~ written out."""
  path = os.path.expanduser(path)
  # What follows : goes to get_config. A pipe might never end.
  if "config" in name and path and not os.path.isfile(path.partition(":")[0]):
    raise ValueError(f"{name}={path} is not a file; see configs/")
  return path


def _call(function, describe, argv):
  """Calls function(argv); signals and expected errors end the process."""
  # No command opens a window, as the backend of a notebook would.
  os.environ["MPLBACKEND"] = "agg"
  # Orbax logs every step it takes.
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  try:
    result = function(argv)
    print(end="", flush=True)  # may fail: a full disk, a closed pipe
    return result
  except (KeyboardInterrupt, signals.Stopped) as error:
    line = f"stopped: {error}" if str(error) else "stopped"
    _end(argv, line, signals.STOPPED)
  except Exception as error:
    verbose = logging.get_verbosity() >= logging.DEBUG
    line = describe(error)
    if line is None or (flags.FLAGS.is_parsed() and verbose):
      raise
    _end(argv, line or type(error).__name__, 1)


def _end(argv, line, status):
  """Prints a line on standard error, and ends the process."""
  print(f"{pathlib.Path(argv[0]).name}: {_on_one_line(line)}", file=sys.stderr)
  try:
    print(end="", flush=True)
  except OSError:
    # Python would try again when it exits, and print a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  sys.exit(status)


def describe(error: Exception) -> str | None:
  """Returns a line about an error for the user; None if it is a bug."""
  if isinstance(error, USER_ERRORS):
    return str(error)
  if isinstance(error, ModuleNotFoundError):
    return version.missing(error)
  for kind, meaning in LIMITS.items():
    if isinstance(error, kind):
      reason = str(error) or kind.__name__
      return f"{meaning} ({reason}); --verbosity=1 shows where"
  if any("xla_bridge" in x.filename for x in _frames(error)):
    return _describe_start(error)
  # The status of XLA's errors, whose class only JAX knows.
  if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
    if re.search(KERNEL_LIMIT, str(error)):
      return (
        "a kernel does not compile for this device, whatever the batch;"
        " --config.attention.backend=batched runs none"
        f" ({str(error).splitlines()[0]})"
      )
    return (
      "the device is out of memory; shorter sequences and smaller batches need"
      " less, and python -m sparse_transformer.explain --compile says how much"
      f" ({str(error).splitlines()[0]})"
    )
  return None


def _frames(error):
  return traceback.extract_tb(error.__traceback__)


def _describe_start(error):
  """Returns a line about devices that JAX does not find."""
  reason = str(error).partition(" (")[0] or "this machine has no such device"
  names = [x for x in ("JAX_PLATFORMS", "XLA_FLAGS") if os.environ.get(x)]
  given = ", ".join(f"{x}={os.environ[x]}" for x in names)
  cure = f"correct or unset {' and '.join(names) or 'what hides them'}"
  return f"JAX finds no devices ({given}): {reason}; {cure}"


def _describe_parsing(error):
  """Returns a line about an error in flags or in a config file."""
  if isinstance(error, flags.Error):
    return str(error)
  if line := describe(error):
    return line
  # Of an unknown field, depending on its depth, the error may contain another.
  if len(error.args) == 1 and isinstance(error.args[0], KeyError):
    error = error.args[0]
  if isinstance(error, KeyError) and error.args:
    return f"--config has no field {error.args[0]}"
  return (
    "--config must name a Python file that defines get_config(), without"
    f" errors: {type(error).__name__}: {error}"
  )


def _on_one_line(text):
  """A message without line breaks and tracebacks, shortened if it is long."""
  # ml_collections quotes the traceback of a config file's error.
  before, mark, _ = text.partition(TRACEBACK)
  if mark:
    after = text.rpartition(TRACEBACK)[2].splitlines()
    text = before + " ".join(x for x in after if not x.startswith(" "))
  text = " ".join(text.split())
  if len(text) <= MAX_LINE:
    return text
  return f"{text[: MAX_LINE * 2 // 3]} ... {text[-MAX_LINE // 3 :]}"
