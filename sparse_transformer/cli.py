"""Command lines: flags, overrides of config fields, one-line errors.

Loading JAX takes seconds, but a misspelled flag should be reported at once.
Commands therefore import heavy packages inside their `main`. Commands import
this module first, and import `flags` from it, so that a missing library is
reported in one line.
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
  """Returns the name of the command in error messages.

  This is the name of the script or, for `python -m PACKAGE`, of the package.
  """
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

# Errors that the user can fix. Any other error is a bug and keeps its
# traceback.
USER_ERRORS = (
  *(ValueError, OSError, FloatingPointError, flags.Error),
  # These are more often caused by a setting than by a bug.
  *(MemoryError, RecursionError, OverflowError),
)
# How XLA's compilers name the memory of one core, as opposed to the memory of
# the device.
KERNEL_LIMIT = "(?i)shared memory|memory space [sv]mem"
OF_KERNEL = (
  "a kernel does not compile because it needs more on-chip memory than this"
  " device has; a smaller batch would not help; set"
  " --config.attention.backend=batched, which uses no such kernels"
)
OF_DEVICE = (
  "the device is out of memory; use shorter sequences or smaller batches, and"
  " run sparse_transformer.explain with --compile and the same --config to see"
  " how much memory a training step needs"
)

Main = Callable[[Sequence[str]], Any]


def run(
  main: Main, parse: Main = flags.FLAGS, takes_words: bool = False
) -> NoReturn:
  """Parses the flags, calls `main` with the other arguments, and exits.

  A user's mistake is reported in one line on standard error, with exit status
  1; --verbosity=1 also prints the traceback. If a signal stops the command, the
  exit status is 130.

  Args:
    main: the function that carries out the command.
    parse: `on_config`, `on_workdir`, `on_either` or `on_file`; by default,
      absl's parser of flags.
    takes_words: whether arguments other than flags are allowed.
  """
  # The encoding of standard output may lack some characters.
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")
  programs.keep()
  sys.unraisablehook = _report
  flags.FLAGS.set_gnu_getopt()  # flags may follow other arguments
  # Parsing runs in `_call` as well, so that mistakes in flags are also
  # reported in one line.
  parse = functools.partial(_parse, parse, takes_words)
  app.run(lambda x: _call(main, x), flags_parser=lambda x: _call(parse, x))


def on_config(argv: Sequence[str], default: str | None = None) -> Sequence[str]:
  """Parses the flags of a command whose --config names a config file.

  Args:
    argv: the command line.
    default: the config file to use if --config is not given. If None, --config
      is required.

  Returns:
    The arguments that are not flags.
  """
  _named_file(argv)
  fields = []
  for name, default_value, meaning, _ in schema.table():
    fields.append(f"{name}={default_value}: {meaning}")
  config_flags.DEFINE_config_file(
    "config",
    default,
    "File that defines the config of the experiment. Its fields can be"
    " overridden, for example with --config.attention.pattern=fixed. The fields"
    " and their defaults:\n" + "\n".join(fields),
  )
  _list_in_help("config")
  return flags.FLAGS(argv)


def on_file(argv: Sequence[str]) -> Sequence[str]:
  """Parses flags as `on_config` does, but --config is optional.

  Without --config, the command reads the config from a file of weights.
  """
  return on_config(argv, config_lib.__file__)


def on_workdir(argv: Sequence[str]) -> Sequence[str]:
  """Parses flags of a command on a run; --config is the config of the run.

  If --config names a file, the code in this file is run first, because it may
  register patterns or data sources.

  Args:
    argv: the command line.

  Raises:
    FileNotFoundError: the workdir contains no config.
    ValueError: --workdir is missing, or the config names a pattern or a data
      source that is not registered.
  """
  flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run, or a file of weights, from which a run in runs/ is"
    " made. Fields of its config can be overridden, for example with"
    " --config.attention.backend=dense. If the config file of the run registers"
    " patterns or data sources, also pass its copy, --config=WORKDIR/config.py,"
    " to run this code.",
  )
  _list_in_help("workdir")
  file, argv = _named_file(argv)
  if file is not None:
    runpy.run_path(file)
  # Flags are parsed twice: the first pass finds --workdir, whose config defines
  # the fields of --config for the second pass.
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

  # The error names the file, but its code is not run without the user's
  # consent, because a workdir may come from someone else.
  file = pathlib.Path(workdir, "config.py")
  unknown = _unregistered(config) & _unregistered(flags.FLAGS.config)
  if unknown and file.exists():
    raise ValueError(
      f"{', '.join(sorted(unknown))} must be registered first; if you trust the"
      f" code in {file}, run {version.command(config=file)}"
    )
  return arguments


def _unregistered(config):
  """Returns the unregistered patterns and data source that a config names."""
  from sparse_transformer import data, patterns

  # Patterns are names before a parenthesis, as in Strided(8) | Local(4).
  used = re.findall(r"(\w+) *\(", config["attention"]["pattern"])
  names = {config["data"]["name"], *used}
  return names - {*data.SOURCES, *patterns.CATALOGUE, *patterns.CONTENT}


def on_either(argv: Sequence[str]) -> Sequence[str]:
  """Calls `on_workdir` if --workdir is given, otherwise `on_config`."""
  if any(re.match(r"--?workdir(=|$)", word) for word in argv[1:]):
    return on_workdir(argv)
  flags.DEFINE_string("workdir", None, "Folder of a run, in place of --config.")
  _list_in_help("workdir")
  return on_config(argv)


def _named_file(argv):
  """Returns (the file that --config names, the arguments without --config).

  Raises FileNotFoundError if the file does not exist, and ValueError if an
  override names an unknown field.
  """
  # This parses with a separate set of flags, because the real --config is
  # defined later, from the contents of the file, and its errors are less
  # helpful.
  first = flags.FlagValues()
  first.set_gnu_getopt()
  flags.DEFINE_string("config", None, "", flag_values=first)
  argv = first(argv, known_only=True)

  for word in argv:
    if override := re.match(r"--?(?:no)?config\.([^=]*)", word):
      schema.check_name(override[1])

  # FILE:ARGUMENT passes an argument to get_config. Without --config, use a path
  # that always exists.
  path = pathlib.Path((first.config or os.devnull).partition(":")[0])
  if not path.exists() or path.is_dir():
    close = path.suffix and atomic.nearest(path)
    close = close or atomic.nearest(pathlib.Path("configs", path.stem))
    raise FileNotFoundError(f"--config={first.config}: no such file{close}")
  return first.config, argv


class Integers(flags.IntegerParser):
  """Parses integers, including those in scientific notation such as 1e3."""

  def convert(self, argument: int | str) -> int:
    """Returns the integer; raises ValueError if it is a fraction like 1.5."""
    with contextlib.suppress(ValueError):
      return super().convert(argument)
    with contextlib.suppress(ValueError, OverflowError):
      # 1e3 is a float to Python, but an integer to users.
      if (number := int(float(argument))) == float(argument):
        return number
    raise ValueError("it must be an integer")


config_flags.register_flag_parser_for_type(int, Integers())


def overrides(in_float32: bool = False) -> dict[str, Any]:
  """Returns the config fields that flags set, as {"group.field": value}.

  Args:
    in_float32: whether to set `model.dtype` to float32 unless a flag sets it.
  """
  values = config_flags.get_override_values(flags.FLAGS["config"])
  return {"model.dtype": "float32"} | values if in_float32 else values


def _report(problem, report=sys.unraisablehook):
  """Reports errors of threads, except those of Orbax after a failed write.

  When a write fails, Orbax closes the event loop of its threads, which causes
  further errors. These are omitted, because the failed write itself has already
  been reported.
  """
  if str(problem.exc_value) != "Event loop is closed":
    report(problem)


def _list_in_help(name):
  """Adds a flag to --help, which lists only flags that the command defines."""
  flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def require(*names: str) -> None:
  """Raises ValueError if a flag is missing or a config field is invalid."""
  for name in names:
    if (flag := flags.FLAGS[name]).value is None:
      what = "returns None" if flag.present else "is missing"
      raise ValueError(f"--{name} {what}; see --help")
  schema.typed(flags.FLAGS.config)


def _parse(parse, takes_words, argv):
  """Parses flags. Their values may be paths that begin with ~/.

  Args:
    parse: parses the command line and returns the arguments that are not flags.
    takes_words: whether arguments other than flags are allowed.
    argv: the command line; must equal `sys.argv`, which is changed in place.

  Raises ValueError if flags, their values or a config file are invalid.
  """
  home = rf"\1{os.path.expanduser('~')}/"

  # Change sys.argv itself, because ml_collections reads overrides from it.
  sys.argv[:] = [re.sub(r"^(--?[a-z_]+=)?~/", home, word) for word in argv]
  try:
    arguments = parse(sys.argv)
  # A config file may raise any error.
  except BaseException as error:
    ends = isinstance(error, KeyboardInterrupt) or _origin(error) == "absl.app"
    if ends or describe(error) is not None:
      raise
    reason = error.args[0] if len(error.args) == 1 else error
    if isinstance(reason, KeyError):
      reason = reason.args[0]
    # get_config returned None, which has no fields to override.
    if "NoneType" in f"{reason}":
      reason = "get_config must return a ConfigDict"
    raise ValueError(f"--config: {type(error).__name__}: {reason}") from error

  if not takes_words and len(arguments) > 1:
    raise ValueError(
      f"unexpected argument {arguments[1]!r}; write settings as --name=value"
    )

  # If a flag is repeated, absl uses its last value, which could hide a mistake
  # in a long command.
  for name in flags.FLAGS:
    times = flags.FLAGS[name].present
    # For these, `present` counts items, not occurrences of the flag.
    if isinstance(flags.FLAGS[name], flags.MultiFlag):
      times = sum(bool(re.match(rf"--?{name}(=|$)", x)) for x in sys.argv)
    if times > 1:
      raise ValueError(f"--{name} is given twice; give it once")

  # A value may be empty by mistake, as --workdir=$DIR is if DIR is unset.
  for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
    if flag.present and flag.value in ("", []):
      raise ValueError(f"--{flag.name} is empty; see --help")
  return arguments


def _call(function, argv):
  """Returns function(argv); on a user error, prints one line and exits."""
  # The environment may choose a matplotlib backend that opens windows or needs
  # a notebook; commands only write files.
  os.environ["MPLBACKEND"] = "agg"
  # Orbax logs every step that it takes, and ml_collections logs errors before
  # it raises them.
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
  """Returns a message about an error for the user, or None if it is a bug.

  A bug keeps its traceback. This function recognizes errors that a user can
  fix: wrong flags or files, missing packages, too little device memory, wrong
  environment variables of JAX.
  """
  try:
    text = str(error)
  # An exception class defined in a config file may have a broken __str__.
  except Exception:
    return type(error).__name__
  if isinstance(error, ModuleNotFoundError):
    return version.missing(error)
  # The class of XLA's errors cannot be named here without importing JAX.
  if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in text:
    reason = OF_KERNEL if re.search(KERNEL_LIMIT, text) else OF_DEVICE
    return f"{reason} ({text.splitlines()[0]})"

  if "JAX_PLATFORMS" in text or _origin(error) == "jax._src.xla_bridge":
    names = "JAX_PLATFORMS", "XLA_FLAGS"
    variables = " ".join(f"{x}={os.environ.get(x, '')}" for x in names)
    # JAX's own text would list backends for which there is no device.
    if not text or "known backends" in text:
      text = "no such device found; unset JAX_PLATFORMS to use other devices"
    return f"JAX cannot start with {variables}: {text}"
  return text if isinstance(error, USER_ERRORS) else None


def _origin(error):
  """Returns the module that raised an error, or None without a traceback."""
  frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
  return frames[-1].f_globals.get("__name__") if frames else None


def _on_one_line(text):
  """Returns text without line breaks and without any quoted traceback."""
  # For an error in a config file, ml_collections quotes its traceback.
  before, mark, after = text.partition("Traceback (most recent call last)")
  last = after.rpartition("\n  ")[2].partition("\n")[2] if mark else ""
  return " ".join(f"{before} {last}".split())
