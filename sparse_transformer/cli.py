"""Command lines: flags, overrides of config fields, one-line errors.

A command imports what it needs inside its `main`, so that a misspelt flag is
reported before JAX loads, which takes seconds. It imports this module first,
and `flags` from it, so that a missing library is reported in one line.
"""

import contextlib
import functools
import io
import os
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sparse_transformer import version


def _program() -> str:
  """What errors call the command: its file, or its package with `python -m`."""
  path = pathlib.Path(sys.argv[0])
  return path.parent.name if path.stem == "__main__" else path.name


if sys.platform == "win32":
  sys.exit(f"{_program()}: runs on Linux and macOS; on Windows, use WSL")
try:
  from absl import app, flags, logging
  from ml_collections import ConfigDict, config_flags

  from sparse_transformer import (
    atomic,
    config as config_lib,
    programs,
    schema,
    signals,
  )
except ModuleNotFoundError as error:
  if (line := version.missing(error)) is None:
    raise
  sys.exit(f"{_program()}: {line}")

# Errors that the user can fix. Any other is a bug and keeps its traceback.
USER_ERRORS = (
  *(ValueError, OSError, FloatingPointError, flags.Error),
  *(MemoryError, RecursionError, OverflowError),  # rather a setting's than ours
)
# What XLA's compilers say of memory that belongs to a core, not to the device.
KERNEL_LIMIT = "(?i)shared memory|memory space [sv]mem"
OF_KERNEL = (
  "a kernel does not compile for this device, whatever the batch;"
  " --config.attention.backend=batched runs none"
)
OF_DEVICE = (
  "the device is out of memory; shorter sequences and smaller batches need"
  " less, and sparse_transformer.explain says how much, with --compile and the"
  " same --config"
)

Main = Callable[[Sequence[str]], Any]


def run(
  main: Main, parse: Main = flags.FLAGS, takes_words: bool = False
) -> NoReturn:
  """Parses the flags, calls `main` with the other arguments, and exits.

  A user's mistake is reported as one line on standard error, with exit status
  1; --verbosity=1 shows where it was raised. A command that a signal stops
  exits with status 130.

  Args:
    main: what the command does.
    parse: `on_config`, `on_workdir` or `on_either`; by default absl's.
    takes_words: whether arguments other than flags are allowed.
  """
  if isinstance(sys.stdout, io.TextIOWrapper):  # may lack Unicode
    sys.stdout.reconfigure(errors="backslashreplace")
  programs.keep()
  sys.unraisablehook = _report
  flags.FLAGS.set_gnu_getopt()  # flags may follow other arguments
  # Both parts run in `_call`, so that wrong flags are reported in a line, too.
  parse = functools.partial(_parse, parse, takes_words)
  app.run(lambda x: _call(main, x), flags_parser=lambda x: _call(parse, x))


def on_config(argv: Sequence[str], default: str | None = None) -> Sequence[str]:
  """Parses flags of a command on an experiment, whose file --config names.

  Args:
    argv: the command line.
    default: the file if --config is not given; None makes it required.

  Returns:
    The arguments that are no flags.
  """
  _named_file(argv)
  fields = []
  for name, default_value, meaning, _ in schema.table():
    fields.append(f"{name}={default_value}: {meaning}")
  config_flags.DEFINE_config_file(
    "config",
    default,
    "File with the experiment's config. Its fields can be overridden:"
    " --config.attention.pattern=fixed. The fields and their defaults:\n"
    + "\n".join(fields),
  )
  _list_in_help("config")
  return flags.FLAGS(argv)


def on_file(argv: Sequence[str]) -> Sequence[str]:
  """`on_config`, where --config is in a file of weights unless it is given."""
  return on_config(argv, config_lib.__file__)


def on_workdir(argv: Sequence[str]) -> Sequence[str]:
  """Parses flags of a command on a trained run, whose config is --config.

  If --config names a file, its code is run first, as it may register patterns
  or data sources.

  Args:
    argv: the command line.

  Raises:
    ValueError: --workdir is missing, the run has no config, or its config names
      something that nothing registers.
  """
  flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run, or a file of weights, which becomes a run in runs/."
    " Fields of its config can be overridden: --config.attention.backend=dense."
    " If the config file of the run registers patterns or data sources, also"
    " pass --config=WORKDIR/config.py, its copy, whose code is then run.",
  )
  _list_in_help("workdir")
  file, argv = _named_file(argv)
  if file is not None:
    runpy.run_path(file)
  # In two passes: the fields of --config are those in --workdir.
  flags.FLAGS(argv, known_only=True)
  workdir = flags.FLAGS.workdir
  if not workdir:
    raise ValueError("--workdir is missing or empty; see --help")
  if os.path.isfile(workdir):
    from sparse_transformer import convert

    workdir = convert.run_of(workdir)
  config = config_lib.read_config(workdir).to_dict()
  config_flags.DEFINE_config_dict("config", ConfigDict(config), sys_argv=argv)

  flags.FLAGS.unparse_flags()
  arguments = flags.FLAGS(argv)
  flags.FLAGS.workdir = workdir

  # The file is named, but not run: a workdir may come from someone else.
  file = pathlib.Path(workdir, "config.py")
  unknown = _unregistered(config) & _unregistered(flags.FLAGS.config)
  if unknown and file.exists():
    raise ValueError(
      f"{', '.join(sorted(unknown))} must be registered first: if you trust the"
      f" code in {file}, run {version.command(config=file)}"
    )
  return arguments


def _unregistered(config):
  """The patterns and the data source that a config names, and nothing adds."""
  from sparse_transformer import data, patterns

  # Names before a bracket, as in Strided(8) | Local(4).
  used = re.findall(r"(\w+) *\(", config["attention"]["pattern"])
  names = {config["data"]["name"], *used}
  return names - {*data.SOURCES, *patterns.CATALOGUE, *patterns.CONTENT}


def on_either(argv: Sequence[str]) -> Sequence[str]:
  """`on_workdir` if --workdir is given, otherwise `on_config`."""
  if any(re.match(r"--?workdir(=|$)", word) for word in argv[1:]):
    return on_workdir(argv)
  flags.DEFINE_string("workdir", None, "Folder of a run, in place of --config.")
  _list_in_help("workdir")
  return on_config(argv)


def _named_file(argv):
  """(what --config names, the arguments without it); both are checked."""
  # A set of flags of its own, because the flag --config is defined later, from
  # the contents of the file, and fails with less helpful errors.
  first = flags.FlagValues()
  first.set_gnu_getopt()
  flags.DEFINE_string("config", None, "", flag_values=first)
  argv = first(argv, known_only=True)

  for word in argv:
    if override := re.match(r"--?(?:no)?config\.([^=]*)", word):
      schema.check_name(override[1])

  # FILE:ARGUMENT passes an argument to get_config. Without --config, the path
  # is one that exists.
  path = pathlib.Path((first.config or os.devnull).partition(":")[0])
  if not path.exists() or path.is_dir():
    close = path.suffix and atomic.nearest(path)
    close = close or atomic.nearest(pathlib.Path("configs", path.stem))
    raise FileNotFoundError(f"--config={first.config}: no such file{close}")
  return first.config, argv


class Integers(flags.IntegerParser):
  """Parses integers, also 1e3."""

  def convert(self, argument: int | str) -> int:
    """The integer in a text; raises ValueError for a fraction, as in 1.5."""
    with contextlib.suppress(ValueError):
      return super().convert(argument)
    with contextlib.suppress(ValueError, OverflowError):
      # 1e3 is a float to Python, but an integer to users.
      if (number := int(float(argument))) == float(argument):
        return number
    raise ValueError("it must be an integer")


config_flags.register_flag_parser_for_type(int, Integers())


def overrides(in_float32: bool = False) -> dict[str, Any]:
  """The fields of --config that flags set: {"group.field": value}.

  Args:
    in_float32: whether to add float32 as `model.dtype`, unless a flag sets it.
  """
  values = config_flags.get_override_values(flags.FLAGS["config"])
  return {"model.dtype": "float32"} | values if in_float32 else values


def _report(problem, report=sys.unraisablehook):
  """Passes on what threads print, except that Orbax closed their event loop."""
  if str(problem.exc_value) != "Event loop is closed":  # as a write failed
    report(problem)


def _list_in_help(name):
  """Lists a flag in --help, which shows only those of the command itself."""
  flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def require(*names: str) -> None:
  """Raises ValueError if a flag is missing, or a field of --config is wrong."""
  for name in names:
    if (flag := flags.FLAGS[name]).value is None:
      what = "returns None" if flag.present else "is missing"
      raise ValueError(f"--{name} {what}; see --help")
  schema.typed(flags.FLAGS.config)


def _parse(parse, takes_words, argv):
  """Parses flags, where paths may begin with ~/, or raises ValueError.

  Args:
    parse: maps the command line to arguments that are no flags.
    takes_words: whether there may be such arguments.
    argv: the command line; `sys.argv` is used, which it equals.
  """
  home = rf"\1{os.path.expanduser('~')}/"

  # ml_collections looks for overrides in sys.argv.
  sys.argv[:] = [re.sub(r"^(--?[a-z_]+=)?~/", home, word) for word in argv]
  try:
    arguments = parse(sys.argv)
  except BaseException as error:  # of a config file, or a field that it lacks
    ends = isinstance(error, KeyboardInterrupt) or _origin(error) == "absl.app"
    if ends or describe(error) is not None:
      raise
    reason = error.args[0] if len(error.args) == 1 else error
    if isinstance(reason, KeyError):
      reason = reason.args[0]
    if "NoneType" in f"{reason}":  # it has no fields to set
      reason = "get_config must return a ConfigDict"
    raise ValueError(f"--config: {type(error).__name__}: {reason}") from error

  if not takes_words and len(arguments) > 1:
    raise ValueError(
      f"unexpected argument {arguments[1]!r}; settings are --name=value"
    )

  # absl takes the last value of a flag, which hides a mistake in
  # a long command.
  for name in flags.FLAGS:
    times = flags.FLAGS[name].present
    if isinstance(flags.FLAGS[name], flags.MultiFlag):  # its items are counted
      times = sum(bool(re.match(rf"--?{name}(=|$)", x)) for x in sys.argv)
    if times > 1:
      raise ValueError(f"--{name} is given twice; give it once")

  # A shell replaces an unset variable by nothing: --workdir=$DIR.
  for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
    if flag.present and flag.value in ("", []):
      raise ValueError(f"--{flag.name} is empty; see --help")
  return arguments


def _call(function, argv):
  """function(argv); errors of the user end the process with one line."""
  # No command opens a window, as the backend of a notebook would.
  os.environ["MPLBACKEND"] = "agg"
  # Orbax logs every step it takes, and ml_collections what it then raises.
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.ERROR)
  try:
    return function(argv)
  except (KeyboardInterrupt, signals.Stopped) as error:
    status = signals.STOPPED
    line = f"stopped: {error}".rstrip(": ")
  except Exception as error:
    status = 1
    reason = describe(error)
    if reason is None or logging.get_verbosity() >= logging.DEBUG:
      raise
    line = reason or type(error).__name__

  print(f"{_program()}: {_on_one_line(line)}", file=sys.stderr)
  sys.exit(status)


def describe(error: BaseException) -> str | None:
  """A line about an error for the user; None if it is a bug.

  Bugs keep their traceback, so this must recognize what a user can change:
  flags, files, missing packages, the memory of a device, variables of JAX.
  """
  try:
    text = str(error)
  except Exception:  # of a class in a config file
    return type(error).__name__
  if isinstance(error, ModuleNotFoundError):
    return version.missing(error)
  # XLA's errors have a class that only JAX knows.
  if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in text:
    reason = OF_KERNEL if re.search(KERNEL_LIMIT, text) else OF_DEVICE
    return f"{reason} ({text.splitlines()[0]})"

  if "JAX_PLATFORMS" in text or _origin(error) == "jax._src.xla_bridge":
    names = "JAX_PLATFORMS", "XLA_FLAGS"
    variables = " ".join(f"{x}={os.environ.get(x, '')}" for x in names)
    if not text or "known backends" in text:  # it lists those without devices
      text = "no such device is found; leave JAX_PLATFORMS unset to use others"
    return f"JAX cannot start with {variables}: {text}"
  return text if isinstance(error, USER_ERRORS) else None


def _origin(error):
  """The name of the module that raised an error; None without a traceback."""
  frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
  return frames[-1].f_globals.get("__name__") if frames else None


def _on_one_line(text):
  """A text without line breaks and, if it quotes a traceback, without that."""
  # ml_collections quotes the traceback of a config file's error.
  before, mark, after = text.partition("Traceback (most recent call last)")
  last = after.rpartition("\n  ")[2].partition("\n")[2] if mark else ""
  return " ".join(f"{before} {last}".split())
