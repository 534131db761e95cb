"""Inputs that commands must reject: the data of test_bad_inputs.py."""

import bz2
import dataclasses
import gzip
import io
import json
import lzma
import os
import pathlib
import re
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable

import numpy as np
import runs

DIGITS = runs.REPO / "configs" / "digits.py"
TRAIN, EVAL = "train.py", "eval.py"
SAMPLE, EXPLAIN, COMPARE, REPORT, DATA, FIGURES = (
  f"sparse_transformer/{name}.py"
  for name in (
    "sample",
    "explain",
    "compare",
    "report",
    "data/__main__",
    "figures/__main__",
  )
)
HUGE = "9" * 5000  # more digits than Python converts
LONG = "x" * 5000  # longer than any name of a file

Prepare = Callable[[pathlib.Path], object]


@dataclasses.dataclass(frozen=True)
class Bad:
  """An input that a command must reject.

  Attributes:
    script: the command.
    words: its arguments; files are relative to the current folder.
    message: a regular expression that the error must match.
    prepare: makes files in the current folder, which is empty. It is called
      with the workdir of a run of two steps, which it may copy.
  """

  script: str
  words: tuple[str, ...]
  message: str
  prepare: Prepare | None = None


def names(*parts: str, rule: str = "") -> str:
  """A regular expression for all of these texts, in any order, and a rule."""
  return "".join(f"(?=.*{re.escape(part)})" for part in parts) + f".*{rule}"


def train(*words: str, message: str, prepare: Prepare | None = None) -> Bad:
  words = f"--config={DIGITS}", "--workdir=new", *words
  return Bad(TRAIN, words, message, prepare)


def explain(*words: str, message: str, prepare: Prepare | None = None) -> Bad:
  return Bad(EXPLAIN, (f"--config={DIGITS}", *words), message, prepare)


def on_run(
  script: str, *words: str, message: str, prepare: Prepare | None = None
) -> Bad:
  """A command on a copy of the run, or on the folder that `prepare` makes."""
  return Bad(script, ("--workdir=run", *words), message, prepare or copy)


# What `prepare` may be.


def several(*steps: Prepare) -> Prepare:
  def prepare(run):
    for step in steps:
      step(run)

  return prepare


def copy(run: pathlib.Path) -> None:
  shutil.copytree(run, "run")


def file(name: str, content: str | bytes = b"") -> Prepare:
  data = content.encode("latin1") if isinstance(content, str) else content

  def prepare(run):
    path = pathlib.Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)

  return prepare


def folder(name: str) -> Prepare:
  return lambda run: pathlib.Path(name).mkdir(parents=True)


def link(name: str, target: str) -> Prepare:
  return lambda run: pathlib.Path(name).symlink_to(target)


def fifo(name: str) -> Prepare:
  return lambda run: os.mkfifo(name)


def bind(name: str) -> Prepare:
  """A socket."""

  def prepare(run):
    with socket.socket(socket.AF_UNIX) as server:
      server.bind(name)

  return prepare


def sparse(name: str, size: int) -> Prepare:
  """A file of zeros, which takes no space."""

  def prepare(run):
    pathlib.Path(name).touch()
    os.truncate(name, size)

  return prepare


def deleted(name: str) -> Prepare:
  """A copy of the run without a file or folder."""

  def prepare(run):
    copy(run)
    path = pathlib.Path("run") / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()

  return prepare


def replaced(name: str, content: str | bytes) -> Prepare:
  """A copy of the run in which a file has other contents."""
  return several(copy, file(f"run/{name}", content))


def made(name: str, step: Callable[[str], Prepare]) -> Prepare:
  """A copy of the run in which a path is something else: folder, fifo."""
  return several(deleted(name), step(f"run/{name}"))


def setting(field: str, value: object) -> Prepare:
  """A copy of the run whose config.json has another value."""
  group, name = field.split(".")

  def prepare(run):
    copy(run)
    path = pathlib.Path("run/config.json")
    settings = json.loads(path.read_text())
    settings[group][name] = value
    path.write_text(json.dumps(settings))

  return prepare


def text_run(run: pathlib.Path) -> None:
  """The config of a run on 500 bytes in windows of 32, and no checkpoint."""
  file("text", b"some text " * 50)(run)
  config = runs.text(pathlib.Path("text"))
  file("run/config.json", json.dumps(config.to_dict()))(run)


def cut(name: str) -> Prepare:
  """A copy of the run in which a file has lost its second half."""

  def prepare(run):
    copy(run)
    (path,) = pathlib.Path("run").glob(name)
    os.truncate(path, path.stat().st_size // 2)

  return prepare


# The fields of a config, on the command line. A value has the type of its
# field and is echoed in the error, or is given with what the error says.

OVERRIDES: dict[str, tuple] = {
  "data.name": (
    ("mnist", "'mnist'.*digits"),
    ("", "data.name"),
    "Digits",
    "../digits",
    "sparse_transformer.data",
  ),
  "model.num_layers": ("0", "-1", "1.5", "1000000000", "many", ""),
  "model.num_heads": (
    ("3", "num_heads=3 must divide model.width=128"),
    *("0", "-2", "1000000000"),
  ),
  "model.width": ("0", "-16", "10000000", str(2**70), "wide"),
  "model.half_size": ("maybe", "2"),
  "model.dropout": ("-0.1", "1.0", "1.5", "nan", "inf", "high"),
  "model.init": ("xavier", ("", "model.init")),
  "model.token_std": ("-1.0", "nan", "inf"),
  "model.position_std": ("-1.0", "nan", "inf"),
  "model.dtype": (
    ("float8", "float8.*float32, bfloat16"),
    *("float64", "int8", "Float32"),
  ),
  "model.remat": (("all", "all.*none, attention"), "True"),
  "attention.mode": (
    ("mixed", "'mixed'.*interleaved, merged, heads"),
    ("", "attention.mode"),
    "heads,merged",
  ),
  "attention.cycle": (
    ("(0,2)", r"\(0, 2\).*0 to 1"),
    ("(-1,)", r"\(-1,\)"),
    ("('a',)", "'a'"),
    ("(0.5,)", "0.5"),
    ("((0,),)", r"\(0,\)"),
    ("(0", r"\(0"),
    ("zero", "zero"),
    ("(0, 1 - 1)", "1 ?- ?1|0"),
    ("x.y", "x.y"),
  ),
  "attention.stride": (
    ("65", "stride=65 .*between 1 and the 64"),
    *("0", "-1", str(2**31), "1" * 30),
  ),
  "attention.window": (
    ("65", "window=65 .*between 1 and the 64"),
    *("0", "-1", str(2**31)),
  ),
  "attention.backend": (
    ("fast", "'fast'.*auto.*dense"),
    ("", "backend"),
    "Dense",
  ),
  "attention.tile": ("-1", "1.5", "many"),
  "optimizer.name": ("sgd", "Muon", "None"),
  "optimizer.learning_rate": ("-1.0", "nan", "inf", ("1e400", "inf"), "fast"),
  "optimizer.adam_learning_rate": ("-1.0", "nan", "inf"),
  "optimizer.warmup_steps": (
    ("700", "warmup_steps=700 .*train.steps=700"),
    *("-1", "701", "1.5"),
  ),
  "optimizer.beta1": ("2.0", "1.0", "-0.1", "nan"),
  "optimizer.beta2": ("2.0", "1.0", "-1.0", "nan"),
  "optimizer.epsilon": ("-1.0", "nan", "inf"),
  "optimizer.weight_decay": ("-1.0", "nan", "inf"),
  "optimizer.clip_norm": ("0.0", "-1.0", "nan"),
  "optimizer.ema_decay": ("-0.1", "1.5", "nan"),
  "train.seed": ("-1", str(2**70), "1.5", "random"),
  "train.steps": ("-1", "2.5", "many", "1" * 30, ("", "train.steps")),
  "train.batch_size": ("0", "-16", "1000000000", str(2**70), "two"),
  "train.accumulation": (
    ("3", "train.batch_size=16 .*multiple.*accumulation=3"),
    *("0", "-1", "17"),
  ),
  "train.log_every": ("-1", "often"),
  "train.nonfinite": (("ignore", "stop, skip"), ("", "train.nonfinite")),
  "train.max_skipped": ("-1", "all"),
  "train.spike": ("-1.0", "nan"),
  "eval.every": ("-1", "never"),
  "eval.batch_size": ("0", "-1", "1.5"),
  "eval.sequences": ("-1", "all"),
  "checkpoint.every": ("-1", "1e3"),
  "checkpoint.keep": ("0", "-1", "all"),
  "checkpoint.keep_best": ("-1", "1.5"),
  "checkpoint.on_error": ("ignore", ("", "checkpoint.on_error")),
}


def overrides():
  for field, values in OVERRIDES.items():
    for value in values:
      text, shown = (value, re.escape(value)) if value == str(value) else value
      message = names(field, rule=shown)
      yield train(f"--config.{field}={text}", message=message)


# Fields that only some networks or sources have.
TEXT = "--config.data.name=bytes", "--config.data.path=text"
some_text = file("text", b"some text " * 100)


def of_some():
  fixed = "--config.attention.pattern=fixed"
  for field, value, rule in (
    ("width", 9, r"width=9|Summary\(8, 9\)"),
    ("width", 0, "width"),
    ("width", -1, "width"),
    ("num_summaries", 0, "num_summaries=0"),
    ("num_summaries", -1, "num_summaries=-1"),
    ("num_summaries", "3 --config.attention.width=4", "shift"),
  ):
    more = f"--config.attention.{field}={value}".split()
    yield train(fixed, *more, message=rule)
  for field, value in (
    ("length", "0"),
    ("length", "-1"),
    ("length", "1001"),
    ("length", str(2**40)),
    ("length", str(2**70)),
    ("length", "1e3"),
    ("columns", "0"),
    ("columns", "-1"),
    ("columns", str(2**40)),
    ("columns", str(2**70)),
  ):
    more = "--config.data.length=32", f"--config.data.{field}={value}"
    message = names(f"data.{field}", value)
    yield train(*TEXT, *more, message=message, prepare=some_text)
  for value in (
    "(0.5, 0.5)",
    "(1.0, 0.0, 0.0)",
    "(0.5, 0.25, 0.5)",
    "(-0.5, 1.0, 0.5)",
    "(nan, 0.5, 0.5)",
    "()",
    "0.9",
    "('0.9', '0.05', '0.05')",
    "('a', 'b', 'c')",
    "(inf, 0.1, 0.1)",
    "(0.9, 0.05, 0.05, 0.0)",
  ):
    more = "--config.data.length=32", f"--config.data.fractions={value}"
    yield train(*TEXT, *more, message="data.fractions", prepare=some_text)
  for value in "0", "-5", str(2**40), "44.1kHz":
    yield train(
      "--config.data.name=audio",
      "--config.data.path=wave.wav",
      f"--config.data.rate={value}",
      message=names("data.rate", value),
      prepare=file("wave.wav", wav()),
    )
  for value in (
    "--config.attention.cycle=(2,)",
    "--config.attention.cycle=(0,1,2)",
  ):
    pattern = "--config.attention.pattern=Local(4), Strided(4)"
    yield train(pattern, value, message="attention.cycle.*2.*0 to 1")


# Every field with a value of another type, which only a config file can give.
OTHER_TYPES: dict[str, tuple[str, ...]] = {
  "data.name": ("None", "7", "['digits']"),
  "data.path": ("None", "7"),
  "data.length": ("'64'", "None", "64.5"),
  "data.columns": ("None", "True"),
  "data.fractions": ("None", "'0.9'", "(0.9, 0.05, '0.05')"),
  "data.rate": ("None", "'12 kHz'"),
  "model.num_layers": ("None", "'2'", "[2]"),
  "model.num_heads": ("None", "True"),
  "model.width": ("None", "16.5", "{}"),
  "model.half_size": ("None", "'no'", "2"),
  "model.dropout": ("None", "'0'", "(0.1,)"),
  "model.init": ("None", "0"),
  "model.token_std": ("None", "'0.1'"),
  "model.position_std": ("None", "[0.1]"),
  "model.dtype": ("None", "32"),
  "model.remat": ("None", "True"),
  "attention.pattern": ("None", "7", "['dense']"),
  "attention.mode": ("None", "['heads']"),
  "attention.cycle": ("None", "0", "'01'"),
  "attention.stride": ("None", "8.5", "'8'"),
  "attention.window": ("None", "'8'"),
  "attention.width": ("None", "'2'"),
  "attention.num_summaries": ("None", "1.5"),
  "attention.backend": ("None", "1"),
  "attention.tile": ("None", "'16'"),
  "optimizer.name": ("None", "1"),
  "optimizer.learning_rate": ("None", "'1e-3'", "1j"),
  "optimizer.adam_learning_rate": ("None", "'1e-3'"),
  "optimizer.warmup_steps": ("None", "0.5"),
  "optimizer.beta1": ("None", "'0.9'"),
  "optimizer.beta2": ("None", "(0.9,)"),
  "optimizer.epsilon": ("None", "'1e-8'"),
  "optimizer.weight_decay": ("None", "'0'"),
  "optimizer.clip_norm": ("None", "'1'"),
  "optimizer.ema_decay": ("None", "'0.9'"),
  "train.seed": ("None", "'0'", "0.5"),
  "train.steps": ("None", "'many'", "1000.0"),
  "train.batch_size": ("None", "16.0", "True"),
  "train.accumulation": ("None", "'1'"),
  "train.log_every": ("None", "'1'"),
  "train.nonfinite": ("None", "False"),
  "train.max_skipped": ("None", "1.5"),
  "train.spike": ("None", "'1.5'"),
  "eval.every": ("None", "0.5"),
  "eval.batch_size": ("None", "'16'"),
  "eval.sequences": ("None", "'all'"),
  "checkpoint.every": ("None", "'1'"),
  "checkpoint.keep": ("None", "1.5"),
  "checkpoint.keep_best": ("None", "'1'"),
  "checkpoint.on_error": ("None", "0"),
}

# A config file that starts with the digits' settings as a dictionary.
EDITED = """
from configs import digits
from ml_collections import ConfigDict
def get_config():
  settings = digits.get_config().to_dict()
  {}
  return ConfigDict(settings)
"""


def on_config(script: str, content: str | bytes | None, message: str) -> Bad:
  words = ("--config=config.py",)
  if script == TRAIN:
    words += ("--workdir=new",)
  if script == COMPARE:
    words += ("--workdir=new", "--vary=attention.pattern=dense,local")
  prepare = None if content is None else file("config.py", content)
  return Bad(script, words, message, prepare)


def other_types():
  for field, values in OTHER_TYPES.items():
    group, name = field.split(".")
    for value in values:
      edit = EDITED.format(f"settings[{group!r}][{name!r}] = {value}")
      yield on_config(TRAIN, edit, names(field, value))


# What a config file contains, and what the error says.
NO_CONFIG = "get_config|config is of type"
CONFIG_FILES: tuple[tuple[str | bytes | None, str], ...] = (
  (None, "config.py"),
  ("", "get_config"),
  ("get_config = None", "config"),
  ("get_config = 7", "config"),
  ("def get_config(:", "config.py|invalid syntax"),
  ("def get_config():\nreturn 1", "config.py|indented"),
  ("\0\1\2", "config.py|null byte"),
  (b"\xff\xfe\x00", "config.py|utf-8|null byte"),
  ("x = " + "(" * 300 + ")" * 300, "parenthes"),
  ("x = " + "-" * 100_000 + "1", "config"),
  ("x = " + HUGE, "config"),
  ("import no_such_module", "no_such_module"),
  ("from configs import no_such_preset", "no_such_preset"),
  ("raise ValueError('a\\nb')", "a b"),
  ("raise Exception", "Exception"),
  ("raise SystemExit(0)", "config"),
  ("import sys\nsys.exit('no GPU here')", "no GPU here"),
  ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E", "config"),
  ("def get_config(): import sys; sys.exit(0)", "config"),
  ("def get_config(): raise GeneratorExit", "config"),
  ("def get_config(): raise MemoryError", "config|memory"),
  ("def get_config(): return get_config()", "recursion"),
  ("def get_config(): return [0] * 10**15", "MemoryError|memory"),
  ("def get_config(): return 1 / 0", "division by zero"),
  ("def get_config(): return {}['colour']", "colour"),
  ("def get_config(): return open('no such file')", "no such file"),
  ("def get_config(size): return size", "size"),
  ("def get_config(): pass", NO_CONFIG),
  ("def get_config(): return 7", NO_CONFIG),
  ("def get_config(): return 'digits'", NO_CONFIG),
  ("def get_config(): return []", NO_CONFIG),
  ("def get_config(): return {}", NO_CONFIG),
  ("def get_config(): yield 1", NO_CONFIG),
  ("def get_config(): return get_config", NO_CONFIG),
  (
    "import types\ndef get_config(): return types.SimpleNamespace(data=1)",
    NO_CONFIG,
  ),
  (
    "from ml_collections import ConfigDict\n"
    "def get_config(): return ConfigDict()",
    "lacks|no group",
  ),
  *(
    (EDITED.format(edit), message)
    for edit, message in (
      ("del settings['eval']", "'?eval'?"),
      ("del settings['train']['steps']", "train.steps"),
      ("del settings['attention']['tile']", "attention.tile"),
      ("del settings['optimizer']['beta1']", "optimizer.beta1"),
      ("del settings['checkpoint']['keep']", "checkpoint.keep"),
      ("del settings['data']['rate']", "data.rate"),
      ("settings['train']['step'] = 4", "train.step"),
      ("settings['attention']['heads'] = 4", "attention.heads"),
      ("settings['model']['depth'] = 4", "model.depth"),
      ("settings['data']['sise'] = 4", "data.sise"),
      ("settings['evaluation'] = {}", "evaluation"),
      ("settings['name'] = 'mine'", "name"),
      ("settings[''] = 1", "config|''"),
      ("settings['model'] = None", "model"),
      ("settings['model'] = 7", "model"),
      ("settings['model'] = {}", "model.num_layers"),
      ("settings['model'] = []", "model"),
      ("settings['train']['steps'] = {'a': 1}", "train.steps"),
      ("settings = {'model': settings}", "lacks|no group"),
      ("settings['train']['steps'] = lambda: 4", "train.steps"),
      ("settings['train']['steps'] = 10**5000", "train.steps"),
      ("settings['train']['seed'] = -10**5000", "train.seed"),
      ("settings['model']['width'] = 10**400", "model.width"),
      (
        "settings['data'] |= dict(name='bytes', path='a\\0b')",
        "data.path|null",
      ),
      ("settings['data']['name'] = 'x' * 10**5", "data.name"),
      ("settings['attention']['cycle'] = (0,) * 10**4 + (9,)", "cycle"),
      ("import os; os.chdir('/no/such')", "/no/such"),
    )
  ),
  (
    "from configs import digits\n"
    "from ml_collections import config_dict\n"
    "def get_config():\n"
    "  config = digits.get_config()\n"
    "  config.train.steps = config_dict.placeholder(int, required=True)\n"
    "  return config",
    "required",
  ),
  (
    "from configs import digits\n"
    "def get_config():\n"
    "  config = digits.get_config()\n"
    "  config.train.steps = 'many'\n"
    "  return config",
    "steps",
  ),
)


def config_files():
  for content, message in CONFIG_FILES:
    yield on_config(TRAIN, content, message)
  for script in EXPLAIN, COMPARE:
    for content, message in CONFIG_FILES[:40:4]:
      yield on_config(script, content, message)
    edit = EDITED.format("settings['optimizer']['beta1'] = 2.0")
    yield on_config(script, edit, r"optimizer\.beta1")
  for path, message, prepare in (
    ("", "--?config.*empty|config", None),
    (".", "folder", None),
    ("/dev/null", "/dev/null", None),
    ("/dev/zero", "/dev/zero", None),
    ("fifo", "fifo", fifo("fifo")),
    ("loop", "loop", link("loop", "loop")),
    ("dangling", "dangling", link("dangling", "nothing")),
    ("folder.py", "folder.py", folder("folder.py")),
    ("socket", "socket", bind("socket")),
    (f"{DIGITS}:8", "get_config|argument", None),
    (LONG, "long", None),
    ("text", "config|syntax", some_text),
    ("digits.pyc", "config|null|utf-8", file("digits.pyc", b"\xcb\r\r\n\0")),
  ):
    words = f"--config={path}", "--workdir=new"
    yield Bad(TRAIN, words, message, prepare)


# Patterns, and what the error says.

PATTERNS: tuple[tuple[str, str], ...] = (
  ("zigzag", "'zigzag'.*dense, local, strided, fixed"),
  ("", "''"),
  (" ", "' *'"),
  ("Dense", "'Dense'"),
  ("strided,local", "'strided'"),
  ("strided | local", "strided"),
  # Malformed.
  ("()", r"\(\)"),
  ("(),()", r"\(\)"),
  ("Local", "'Local'"),
  ("Local(", r"Local\("),
  ("Local(3", r"Local\(3"),
  ("Local(3))", r"Local\(3\)\)"),
  ("Local(3) |", r"Local\(3\) \|"),
  ("| Local(3)", r"\| Local\(3\)"),
  ("Local(3),,Local(4)", ",,"),
  ("Local(3); Local(4)", ";"),
  ("Local(3) Local(4)", r"Local\(3\) Local\(4\)"),
  ("(((Local(3),),),)", r"Local\(3\)"),
  # Not patterns.
  ("3", "3"),
  ("'Local(3)'", r"Local\(3\)"),
  ("[Local(3)]", r"\[Local\(3\)\]"),
  ("{Local(3)}", r"\{Local\(3\)\}"),
  ("Local(3) | 4", "4"),
  ("Local(3) | dense", "dense"),
  ("Local[3]", r"Local\[3\]"),
  ("Local(3)(4)", r"Local\(3\)\(4\)"),
  ("Local(3).mask", "mask"),
  ("patterns.Local(3)", "patterns.Local"),
  ("lambda: Local(3)", "lambda"),
  ("(x := Local(3))", ":="),
  ("Local(3) if 1 else Local(4)", "if 1 else"),
  ("[Local(n) for n in (3, 4)]", "for n in"),
  ("f'{Local(3)}'", "f'"),
  ("*[Local(3)]", r"\*"),
  ("...", r"\.\.\.|Ellipsis"),
  ("await Local(3)", "await"),
  ("__import__('os').system('touch new')", "__import__"),
  # Operators that sets do not have.
  ("Local(3) + Local(4)", r"\+"),
  ("Local(3) * 2", r"\*"),
  ("Local(3) ^ Local(4)", r"\^"),
  ("~Local(3)", "~"),
  ("-Local(3)", "-"),
  ("Local(3) and Local(4)", "and"),
  ("not Local(3)", "not"),
  ("Local(3) < Local(4)", "<"),
  ("Local(3) @ Local(4)", "@"),
  # Arguments.
  ("Local()", "window"),
  ("Local(0)", r"Local\(0\).*at least 1"),
  ("Local(-1)", r"Local\(-1\).*at least 1"),
  ("Local(2.5)", "2.5.*integer"),
  ("Local('3')", "integer"),
  ("Local(True)", "integer"),
  ("Local(None)", "integer"),
  ("Local([3])", "integer"),
  ("Local({})", "integer"),
  ("Local(1e3)", "1000.0.*integer"),
  ("Local(3, 4)", "causal"),
  ("Local(3, True, 4)", "Local|argument"),
  ("Local(3, causal='yes')", "causal"),
  ("Local(3, causal=None)", "causal"),
  ("Local(3, window=3)", "window"),
  ("Local(window=3, window=4)", "window"),
  ("Local(size=3)", "size"),
  ("Local(window=3, colour=1)", "colour"),
  ("Local(*[3])", r"\*"),
  ("Local(**{'window': 3})", r"\*\*|window"),
  ("Local(n)", "'?n'?"),
  ("Local(1 + 2)", r"1 \+ 2"),
  ("Local(10**3)", r"10 ?\*\* ?3"),
  ("Local(Local(3))", r"Local\(3\)"),
  ("Local(print('hello'))", "print"),
  (f"Local({2**31})", "32 bits"),
  (f"Local({10**30})", "32 bits"),
  (f"Local({HUGE})", "attention.pattern"),
  ("Local(0x" + "f" * 5000 + ")", "attention.pattern|32 bits"),
  ("Local(3, " * 50 + ")" * 50, "Local"),
  ("Dilated(5)", "dilation"),
  ("Dilated(5, 0)", "dilation"),
  ("Dilated(2000000000, 2000000000)", "Dilated.*2000000000"),
  ("Strided(0)", "stride"),
  ("Block(8, previous=-1)", "previous"),
  ("Summary(8, 9)", r"Summary\(8, 9\)"),
  ("Summary(8, 4, shift=2)", "shift"),
  ("Summary(8, 2, -1)", "shift"),
  ("LogSparse(0)", "window"),
  ("Global(0)", "Global"),
  ("RandomBlocks(4, 2, seed=-1)", "seed"),
  ("RandomBlocks(4, 2, first=-1)", "first"),
  ("RandomBlocks(3, 2000000000)", "RandomBlocks.*2000000000"),
  ("RandomBlocks(3, 100000)", "RandomBlocks.*100000"),
  ("Longformer(8, 0)", "num_global"),
  ("BigBird(8, window=2)", "odd"),
  ("BigBird(8, num_random=2000000000)", "2000000000"),
  ("BigBird(2000000000, num_global=2000000000)", "32 bits"),
  ("Row(0)", "columns"),
  ("Row(4, channels=0)", "channels"),
  ("Row(2000000000, 2000000000)", "2000000000"),
  ("Column('a')", "columns"),
  ("Neighborhood(3, 3)", "columns"),
  ("Union(Local(3), Local(4))", "Union"),
  ("Pattern()", "Pattern"),
  # Not causal, or empty.
  ("Full()", r"Full\(\).*later key.*& Causal\(\)"),
  ("Local(3, causal=False)", "later key"),
  ("Local(3) | Full()", "later key"),
  ("Local(3), Full()", "later key"),
  ("(Local(3), Full())", "later key"),
  ("Full() - Local(3)", "later key"),
  ("Global(4, causal=False)", "later key"),
  ("Local(3) - Causal()", r"Local\(3\) - Causal\(\)"),
  ("Local(3) - Local(3)", r"Local\(3\) - Local\(3\)"),
  ("Strided(8), Local(3) - Causal()", r"Local\(3\) - Causal\(\)"),
  # Deep or long.
  ("-" * 5000 + "Local(3)", "attention.pattern"),
  ("~" * 5000 + "Local(3)", "attention.pattern"),
  ("(" * 5000, "attention.pattern"),
  ("[" * 5000 + "]" * 5000, "attention.pattern"),
  ("(" * 150 + "Local(3),)" + ",)" * 149, "attention.pattern"),
  ("Local(3" + "-3" * 5000 + ")", "attention.pattern"),
  (" | ".join(["Local(3)"] * 800), "attention.pattern"),
  (" | ".join(f"Strided({k})" for k in range(1, 301)), "attention.pattern"),
  ("Local(3) | (" * 90 + "Local(3)" + ")" * 90, "attention.pattern"),
  ("Local(3), " * 10_000, "attention.pattern"),
  (HUGE, "attention.pattern"),
  ("x" * 100_000, "attention.pattern"),
  ("Local(" + "[" * 150 + "]" * 150 + ")", "attention.pattern|integer"),
  # Other letters.
  ("L\u043ecal(3)", "attention.pattern"),
  ("Local\uff083\uff09", "attention.pattern"),
  ("Local(\uff13)", "attention.pattern"),
  ("Local(3)\u202e", "attention.pattern"),
  ("\U0001f642", "attention.pattern"),
  ("Local(3)\udcff", "attention.pattern|surrogates"),
  ("Local(3)\x1b[31m", "attention.pattern"),
)


def patterns():
  for text, message in PATTERNS:
    yield train(f"--config.attention.pattern={text}", message=message)
  for text, message in PATTERNS[::12]:
    word = f"--config.attention.pattern={text}"
    yield explain(word, message=message)
    yield on_run(EVAL, word, message=message)
    yield on_run(SAMPLE, word, message=message)
  for text, message in PATTERNS[5::30]:
    yield compare(f"--vary=attention.pattern=dense;{text}", message=message)


# Flags.


def flags():
  config, new = f"--config={DIGITS}", "--workdir=new"
  for word, message in (
    ("more", "unexpected argument 'more'.*--name=value"),
    ("--wrokdir=there", "wrokdir"),
    ("-w", "'w'"),
    ("--config.attention.patern=fixed", "patern"),
    ("--config.atention.pattern=fixed", "atention"),
    ("--config.train.steps.more=4", "steps"),
    ("--config.train=3", "train"),
    ("--config.train.=3", "train"),
    ("--config.train.batch-size=8", "batch-size"),
    ("--config.train,steps=8", "train,steps"),
    ("--config.train.steps[0]=8", "steps"),
    ("--config.=3", r"--config\."),
    ("--config.data.__class__=3", "__class__"),
    ("--config.train.steps", "train.steps"),
    ("--noconfig", "noconfig"),
    ("--workdir", "workdir"),
    ("--replay", "replay"),
    ("--replay=0", "replay=0"),
    ("--replay=-1", "replay=-1"),
    ("--replay=last", "replay.*last"),
    ("--replay=1.5", "replay.*1.5"),
    ("--replay=3", "new is not a run"),
    ("--verbosity=loud", "verbosity.*loud"),
    ("--flagfile=nowhere", "nowhere"),
    ("--config.train.steps=\u0664\u0664.5", "train.steps"),
    (f"--config.train.steps={HUGE}", "train.steps"),
    (f"--{LONG}", "too long|xxx"),
  ):
    yield train(word, message=message)
  yield Bad(TRAIN, (new,), "--config is missing")
  yield Bad(TRAIN, (config,), "--workdir is missing")
  same = (
    "from sparse_transformer import config\n"
    "def get_config(): return config.read_config('run')"
  )
  for step in "3", str(2**70):
    words = "--config=same.py", "--workdir=run", f"--replay={step}"
    prepare = several(copy, file("same.py", same))
    yield Bad(TRAIN, words, f"{step}.*replayed.*steps 1 to 2", prepare)
  yield Bad(TRAIN, (config, "--workdir="), "--workdir.*empty|--workdir=''")
  yield Bad(TRAIN, (), "--config is missing")
  yield Bad(EXPLAIN, (), "--config is missing")
  for script in EVAL, SAMPLE, REPORT:
    yield Bad(script, (), "--workdir is missing")
    yield Bad(script, ("--workdir=",), "--workdir|run")
    yield Bad(script, ("--workdir=nowhere",), "nowhere is not a run.*train.py")
    yield Bad(script, (f"--workdir={LONG}",), "long|not a run")
    yield Bad(script, ("--workdir=~nobody/run",), "~nobody/run")
    yield on_run(script, "more", message="unexpected argument 'more'")
    yield on_run(script, "--wrokdir=there", message="wrokdir")
    yield on_run(script, "--config.train.stepz=3", message="stepz")
    yield on_run(script, "--config=x", message="--config")
  for word, message in (
    ("--split=tests", "tests.*train.*validation.*test"),
    ("--split=", "split"),
    ("--weights=best", "best.*ema"),
    ("--min_context=-1", "min_context=-1"),
    ("--min_context=3", "min_context=3 must be 0 for images"),
    ("--min_context=", "min_context"),
    ("--min_context=x", "min_context=x"),
    ("--min_context=0,", "min_context=0,"),
    ("--min_context=0.5", "min_context=0.5"),
    (f"--min_context={10**30}", "min_context"),
    (f"--min_context={HUGE}", "min_context"),
    ("--step=last", "step=last"),
    ("--step=best,2", "step=best,2"),
    ("--step=99", "no checkpoint of step 99.* 2$"),
    ("--step=-1", "no checkpoint of step -1|step=-1"),
    ("--step=2,99", "no checkpoint of step 99"),
    ("--step=all,2", "step=all,2"),
    ("--step=2,,2", "step=2,,2"),
    (f"--step={10**30}", "no checkpoint of step 1000|step=1000"),
    (f"--step={HUGE}", "step"),
    ("--config.eval.batch_size=0", "eval.batch_size=0"),
    ("--config.eval.batch_size=-1", "eval.batch_size=-1"),
    ("--config.eval.batch_size=1000000000000", "eval.batch_size=1000000000000"),
    ("--config.model.width=32", "another network.*overrides"),
    ("--config.model.width=10000000", "model.width=10000000|another network"),
    ("--config.model.num_heads=3", "num_heads=3"),
    ("--config.attention.stride=x", "attention.stride.*x"),
    ("--config.attention.stride=0", "attention.stride=0"),
    ("--config.attention.backend=fast", "fast"),
    ("--config.attention.backend=triton", "needs an NVIDIA GPU"),
    ("--config.attention.backend=mosaic", "needs a TPU"),
    ("--config.attention.tile=-1", "tile=-1"),
    ("--config.data.name=mnist", "mnist"),
  ):
    yield on_run(EVAL, word, message=message)
  for word, message in (
    ("--num=0", "num=0"),
    ("--num=-1", "num=-1"),
    ("--num=1.5", "num.*1.5"),
    ("--num=", "num"),
    ("--num=1000000000", "num=1000000000"),
    (f"--num={2**70}", f"num={2**70}"),
    ("--temperature=-1", "temperature=-1"),
    ("--temperature=nan", "temperature=nan"),
    ("--temperature=inf", "temperature=inf"),
    ("--temperature=warm", "temperature.*warm"),
    ("--top_k=-1", "top_k=-1"),
    ("--top_k=1.5", "top_k.*1.5"),
    ("--top_p=0", "top_p=0"),
    ("--top_p=1.5", "top_p=1.5"),
    ("--top_p=-1", "top_p=-1"),
    ("--top_p=nan", "top_p=nan"),
    (f"--seed={2**70}", f"seed={2**70}"),
    (f"--seed={-(2**70)}", f"seed={-(2**70)}"),
    ("--seed=x", "seed.*x"),
    ("--step=99", "no checkpoint of step 99"),
    ("--step=-1", "no checkpoint of step -1|step=-1"),
    ("--step=all", "step.*all"),
    ("--step=best,2", "step=best,2"),
    ("--given=-1", "given=-1"),
    ("--given=65", "given=65 .*64"),
    ("--given=1000000000000", "given=1000000000000"),
    ("--given=half", "given.*half"),
    ("--prompt=text", "--prompt is for text"),
    ("--cache=maybe", "cache.*maybe"),
    ("--config.model.num_layers=0", "num_layers"),
    ("--config.optimizer.beta1=2.0", "beta1"),
  ):
    yield on_run(SAMPLE, word, message=message)
  for word, message in (
    ("more", "unexpected argument 'more'"),
    ("--jsn", "jsn"),
    ("--json=maybe", "json.*maybe"),
    ("--out", "out"),
    ("--config.train.batch_size=0", "batch_size=0"),
    ("--config.train.accumulation=3", "accumulation=3"),
    ("--config.attention.stride=x", "stride.*x"),
    ("--config.model.num_heads=3", "num_heads=3"),
    ("--config.optimizer.beta2=-1.0", "optimizer.beta2=-1.0"),
    ("--config.data.name=mnist", "mnist"),
    ("--target", "target"),
    ("--target=", "--target is empty"),
    ("--target=h1000", "unknown target 'h1000'; known: .*h100"),
    ("--target=h100:8", "slices x hosts x GPUs, such as h100:1x1x8"),
    ("--target=v5e:0x1", "topology of v5e is X x Y"),
    ("--target=v5e:8x8", "batch_size=16.*multiple of 64 devices"),
    ("--part=attention", "--part.*--target"),
    ("--part=layer", "part.*layer"),
  ):
    yield explain(word, message=message)
  for words, message in (
    ((), "one argument"),
    (("a.png", "b.png"), "one argument"),
    (("nowhere/a.png",), "nowhere"),
    (("a.xyz",), "xyz"),
    (("--out=a.png",), "out"),
    (("",), "argument|file"),
    ((".",), "argument|file"),
  ):
    yield Bad(FIGURES, words, message)


# Comparisons.


def compare(*words: str, message: str, prepare: Prepare | None = None) -> Bad:
  words = f"--config={DIGITS}", "--workdir=new", *words
  return Bad(COMPARE, words, message, prepare)


def comparisons():
  for text, message in (
    ("", "vary"),
    ("=", "vary=="),
    ("pattern", "no field 'pattern'"),
    ("attention.pattern", "different values"),
    ("attention.pattern=", "different values"),
    ("attention.pattern=dense,,local", "different values"),
    ("attention.pattern=dense,dense", "different values"),
    ("attention.pattern=dense,dense ", "different values"),
    ("attention.pattern=dense,zigzag", "zigzag"),
    ("attention.pattern=Full(),dense", r"Full\(\)"),
    ("attention.patern=dense", "no field 'attention.patern'"),
    ("attention=dense", "no field 'attention'"),
    ("attention.=dense", "no field 'attention.'"),
    (".pattern=dense", "no field '.pattern'"),
    ("attention.pattern.x=dense", "no field 'attention.pattern.x'"),
    ("attention.cycle=(0,),(2,)", r"attention.cycle.*2"),
    ("attention.cycle=(0,", "attention.cycle"),
    ("attention.stride=8,65", "attention.stride=65"),
    ("train.seed=1,2", "train.seed"),
    ("train.steps=2,4", "train.steps"),
    ("train.batch_size=0,4", "train.batch_size=0"),
    ("train.batch_size=8,1000000000", "train.batch_size=1000000000"),
    ("train.accumulation=1,3", "accumulation=3"),
    ("checkpoint.keep=0,1", "checkpoint.keep=0"),
    ("checkpoint.on_error=stop,ignore", "checkpoint.on_error.*ignore"),
    ("model.width=16,wide", "model.width.*wide"),
    ("model.width=16,17", "model.width=17|num_heads"),
    ("model.width=16,10000000", "model.width=10000000"),
    ("model.width=16,1e1", "model.width.*(1e1|10)"),
    ("model.width=__import__('os')", "model.width"),
    (f"model.width=1,{HUGE}", "model.width"),
    ("model.width=" + "[" * 2000, "model.width"),
    ("model.half_size=True,maybe", "model.half_size.*maybe"),
    ("model.dropout=0.0,1.0", "model.dropout=1.0"),
    ("optimizer.learning_rate=0.001,-1.0", "optimizer.learning_rate=-1.0"),
    ("optimizer.learning_rate=0.001,nan", "optimizer.learning_rate"),
    ("optimizer.beta1=0.9,2.0", "optimizer.beta1=2.0"),
    ("optimizer.clip_norm=0.0,1.0", "optimizer.clip_norm=0.0"),
    ("eval.batch_size=0,8", "eval.batch_size=0"),
    ("data.name=digits,mnist", "mnist"),
    ("data.fractions=0.9,0.05,0.05", "data.fractions"),
  ):
    yield compare(f"--vary={text}", message=message)
  vary = "--vary=attention.pattern=dense,local"
  for text in (
    *(
      "",
      "500",
      "steps",
      "steps:",
      "steps:x",
      "hours:3",
      "steps:0",
      "steps:-1",
    ),
    *("steps:-1", "steps:nan", "steps:inf", "steps:0.5", "steps:2.5"),
    *(
      "steps:1e30",
      "seconds:0",
      "seconds:nan",
      "processor_seconds:0",
      "flops:-1",
      "flops:1e400",
    ),
    *("steps:1e400", "Steps:5", "steps=5", f"steps:{HUGE}", "steps:5:5"),
  ):
    shown = re.escape(f"--budget={text}") if 0 < len(text) < 99 else "--budget"
    yield compare(vary, f"--budget={text}", message=shown)
  for word, message in (
    ("--seeds=0", "seeds=0"),
    ("--seeds=-1", "seeds=-1"),
    ("--seeds=1.5", "seeds.*1.5"),
    ("--seeds=two", "seeds.*two"),
    ("--split=test", "split"),
    ("--workdir=", "--workdir"),
    ("--workdir=/proc/nowhere", "/proc/nowhere"),
    ("more", "unexpected argument 'more'"),
    ("--varry=x", "varry"),
  ):
    yield compare(vary, word, message=message)
  yield compare("--budget=steps:3", message="--vary is missing")
  yield compare("--vary=train.steps=2,4", "--budget=steps:3", message="steps")
  yield Bad(COMPARE, (f"--config={DIGITS}", vary), "--workdir is missing")
  yield Bad(COMPARE, (vary, "--workdir=new"), "--config is missing")
  yield compare(vary, message="new", prepare=file("new", "mine"))
  for content in "", "{", "[]", "7", "null", "{}", '{"seeds": 2}':
    prepare = file("new/comparison-of.json", content)
    message = "comparison-of.json|another comparison"
    yield compare(vary, message=message, prepare=prepare)
  path = "new/comparison-of.json"
  yield compare(vary, message="comparison-of.json", prepare=folder(path))
  prepare = several(folder("new"), fifo(path))
  yield compare(vary, message="comparison-of.json", prepare=prepare)


# Files of data.


def wav(
  rate: int = 12_000, channels: int = 1, frames: int = 500, claimed: int = 0
) -> bytes:
  """A WAV file of 16-bit samples; `claimed` is what its header says."""
  data = bytes(2 * channels * frames)
  form = struct.pack(
    "<HHIIHH", 1, channels, rate, 2 * channels * rate % 2**32, 2 * channels, 16
  )
  size = claimed or len(data)
  body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
  body += b"data" + struct.pack("<I", size) + data
  return b"RIFF" + struct.pack("<I", len(body)) + body


def float_wav(*samples: float) -> bytes:
  form = struct.pack("<HHIIHH", 3, 1, 12_000, 48_000, 4, 32)
  data = np.array(samples, "<f4").tobytes()
  body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
  body += b"data" + struct.pack("<I", len(data)) + data
  return b"RIFF" + struct.pack("<I", len(body)) + body


def zipped(*members: tuple[str, bytes]) -> bytes:
  content = io.BytesIO()
  with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
    for name, data in members:
      archive.writestr(name, data)
  return content.getvalue()


def encrypted() -> bytes:
  """A zip archive whose member says that it is encrypted."""
  data = bytearray(zipped(("a", b"text" * 99)))
  data[6] |= 1
  data[data.index(b"PK\1\2") + 8] |= 1
  return bytes(data)


def npy(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
  """The header of a .npy file, with a few bytes of data."""
  header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}"
  line = header.ljust(117).encode() + b"\n"
  return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line + bytes(99)


RANDOM = np.random.RandomState(0).bytes(3000)
ZEROS = bytes(2**24)
MANY = 2**16  # of 16 MiB: 1 TiB


def repeated(part: Callable[[], bytes], times: int) -> Callable[[str], Prepare]:
  """A file of many equal compressed streams, of which each holds 16 MiB."""

  def of(name):
    def prepare(run):
      data, size = part(), 0
      with pathlib.Path(name).open("wb") as file:
        while size < times * len(data):
          size += file.write(data * 1000)

    return prepare

  return of


# What data.path names, for data.name=bytes; and what the error says.
TEXTS: tuple[tuple[str, str, Prepare | None], ...] = (
  ("", "data.path", None),
  ("nowhere", "nowhere.*data.path", None),
  ("~no-such-user/text", "~no-such-user/text", None),
  (LONG, "long", None),
  ("text/more", "text/more", some_text),
  ("text\udcff", "text", None),
  # Not regular files.
  ("fifo", "fifo", fifo("fifo")),
  ("socket", "socket", bind("socket")),
  ("/dev/zero", "/dev/zero", None),
  ("/dev/urandom", "/dev/urandom", None),
  ("/dev/tty", "/dev/tty", None),
  ("/dev/null", "/dev/null|empty", None),
  ("fifo.gz", "fifo.gz", fifo("fifo.gz")),
  ("fifo.zip", "fifo.zip", fifo("fifo.zip")),
  ("zero.gz", "zero.gz|/dev/zero", link("zero.gz", "/dev/zero")),
  ("zero", "zero", link("zero", "/dev/zero")),
  ("loop", "loop", link("loop", "loop")),
  ("dangling", "dangling", link("dangling", "nothing")),
  # Folders.
  ("folder", "folder has no file", folder("folder")),
  ("folder", "fifo", several(folder("folder"), fifo("folder/fifo"))),
  ("folder", "folder has no file", folder("folder/folder")),
  (
    "folder",
    "z is a",
    several(folder("folder"), link("folder/z", "/dev/zero")),
  ),
  ("folder.zip", "empty|folder.zip", folder("folder.zip")),
  # Too small, too large.
  ("text", "empty", file("text")),
  ("text", "data.length=32", file("text", b"short " * 3)),
  ("text", "text.*memory", sparse("text", 2**43)),
  # Archives.
  ("a.gz", "a.gz is (damaged|empty)|empty", file("a.gz")),
  ("a.gz", "a.gz is damaged", file("a.gz", b"text" * 100)),
  ("a.gz", "a.gz is damaged", file("a.gz", gzip.compress(RANDOM)[:2000])),
  ("a.gz", "a.gz is damaged", file("a.gz", gzip.compress(RANDOM)[:-4])),
  ("a.gz", "a.gz is damaged", file("a.gz", gzip.compress(RANDOM) + b"\1" * 99)),
  ("a.bz2", "a.bz2 is damaged", file("a.bz2", bz2.compress(RANDOM)[:2000])),
  ("a.bz2", "a.bz2 is damaged", file("a.bz2", b"BZh9" + RANDOM)),
  ("a.bz2", "a.bz2 is damaged|empty", file("a.bz2")),
  ("a.xz", "a.xz is damaged", file("a.xz", lzma.compress(RANDOM)[:2000])),
  ("a.xz", "a.xz is damaged", file("a.xz", RANDOM)),
  ("a.XZ", "a.XZ is damaged", file("a.XZ", RANDOM)),
  ("a.zip", "a.zip is damaged", file("a.zip")),
  ("a.zip", "a.zip is damaged", file("a.zip", RANDOM)),
  ("a.zip", "a.zip is damaged", file("a.zip", zipped(("a", RANDOM))[:-30])),
  ("a.zip", "a.zip is damaged", file("a.zip", zipped(("a", RANDOM))[30:])),
  ("a.zip", "empty", file("a.zip", zipped())),
  ("a.zip", "empty", file("a.zip", zipped(("folder/", b"")))),
  ("a.zip", "a.zip.*(password|encrypted)", file("a.zip", encrypted())),
  # More than any memory holds.
  (
    "a.gz",
    "a.gz.*(memory|expands)",
    repeated(lambda: gzip.compress(ZEROS, 9), MANY // 16)("a.gz"),
  ),
  (
    "a.bz2",
    "a.bz2.*(memory|expands)",
    repeated(lambda: bz2.compress(ZEROS), MANY)("a.bz2"),
  ),
)

# {data.name: what data.path names, as above}
OF_OTHER_KINDS: dict[str, tuple[tuple[str, str, Prepare | None], ...]] = {
  "fasta": (
    ("dna.fa", "dna.fa is not a FASTA", file("dna.fa")),
    ("dna.fa", "dna.fa is not a FASTA", file("dna.fa", b"ACGT" * 100)),
    ("dna.fa", "empty", file("dna.fa", b">only a header")),
    ("dna.fa", "dna.fa.*ACGT", file("dna.fa", b">a\n" + b"PROTEIN" * 99)),
    ("dna.fa", "dna.fa.*ACGT", file("dna.fa", b">a\n" + RANDOM)),
    ("dna", r"dna has no file.*\.fasta", folder("dna")),
    ("dna", r"dna has no file.*\.fasta", file("dna/dna.txt", b">a\nACGT")),
    ("dna", "a.fa", several(folder("dna"), fifo("dna/a.fa"))),
    ("dna", "dna has no file", folder("dna/a.fa")),
    ("dna.fa.gz", "dna.fa.gz is damaged", file("dna.fa.gz", b">a\nACGT" * 9)),
  ),
  "audio": (
    ("a.wav", "a.wav is damaged", file("a.wav")),
    ("a.wav", "a.wav is damaged", file("a.wav", RANDOM)),
    ("a.wav", "a.wav is damaged", file("a.wav", wav()[:500])),
    ("a.wav", "a.wav is damaged", file("a.wav", b"RIFF\0\0\0\0WAVE")),
    ("a.wav", "a.wav has 2 channels", file("a.wav", wav(channels=2))),
    ("a.wav", "empty|a.wav", file("a.wav", wav(frames=0))),
    ("a.wav", "a.wav.*0", file("a.wav", wav(rate=0))),
    ("a.wav", "a.wav.*1", file("a.wav", wav(rate=1, frames=10**6))),
    ("a.wav", "a.wav|empty|length", file("a.wav", wav(rate=2**32 - 1))),
    ("a.wav", "a.wav", file("a.wav", wav(claimed=2**32 - 2))),
    ("a.wav", "sample 1 is nan", file("a.wav", float_wav(0, np.nan, 0))),
    ("a.wav", "sample 1 is inf", file("a.wav", float_wav(0, np.inf, 0))),
    ("music", r"music has no file.*\.wav", folder("music")),
    ("music", "a.wav", several(folder("music"), fifo("music/a.wav"))),
  ),
  "text8": (
    ("text", "text has 1,000 .*text8 has", some_text),
    ("text", "text.*a to z", file("text", b"UPPER" * 99)),
    ("fifo", "fifo", fifo("fifo")),
    ("folder", "folder", folder("folder")),
    ("", "data.path", None),
  ),
  "enwik8": (
    ("text", "text has 1,000 bytes, but enwik8 has", some_text),
    ("folder", "folder.*prepare enwik8", folder("folder")),
    ("nowhere", "nowhere.*prepare enwik8", None),
    ("fifo", "fifo", fifo("fifo")),
    ("/dev/zero", "/dev/zero", None),
    ("a.zip", "a.zip is damaged", file("a.zip", RANDOM)),
  ),
  "cifar10": (
    ("folder", "folder.*prepare cifar10", folder("folder")),
    ("text", "text.*prepare cifar10|text", some_text),
    (
      "folder",
      "damaged|cifar10",
      file("folder/cifar10/3.0.2/cifar10-train.array_record-0-of-1", RANDOM),
    ),
    (
      "folder",
      "cifar10",
      file("folder/cifar10/3.x/cifar10-train.array_record-0-of-1", RANDOM),
    ),
  ),
  "imagenet64": (
    ("folder", "folder.*downsampled_imagenet", folder("folder")),
    *(
      ("npy", message, file("npy/train_64x64.npy", content))
      for message, content in (
        ("train_64x64.npy is damaged", b""),
        ("train_64x64.npy is damaged", RANDOM),
        ("train_64x64.npy is damaged", npy((10**6, 64, 64, 3))),
        ("train_64x64.npy", npy((10**30, 64, 64, 3))),
        ("train_64x64.npy", npy((-1, 64, 64, 3))),
        ("valid_64x64.npy", npy((0, 64, 64, 3))),
        ("train_64x64.npy holds float", npy((1, 4), "<f4")),
        ("train_64x64.npy holds uint8", npy((3, 3))),
        ("train_64x64.npy holds uint8", npy(())),
        ("train_64x64.npy", npy((1,), "|O")),
      )
    ),
    (
      "npy",
      "train_64x64.npy",
      several(folder("npy"), fifo("npy/train_64x64.npy")),
    ),
  ),
}


def data():
  small = "--config.data.length=32", "--config.data.columns=8"
  for path, message, prepare in TEXTS:
    words = "--config.data.name=bytes", f"--config.data.path={path}"
    yield train(*words, *small, message=message, prepare=prepare)
  for name, cases in OF_OTHER_KINDS.items():
    for path, message, prepare in cases:
      words = f"--config.data.name={name}", f"--config.data.path={path}"
      yield train(*words, *small, message=message, prepare=prepare)
  # Other commands read the same files.
  for path, message, step in (
    ("nowhere", "nowhere", None),
    ("fifo", "fifo", fifo("fifo")),
    ("/dev/zero", "/dev/zero", None),
    ("a.gz", "a.gz is damaged", file("a.gz", RANDOM)),
  ):
    prepare = several(text_run, step) if step else text_run
    word = f"--config.data.path={path}"
    yield on_run(EVAL, word, message=message, prepare=prepare)
    word = f"--prompt={path}"
    yield on_run(SAMPLE, word, message=message, prepare=prepare)
  for words, message in (
    (("--prompt=",), "prompt|checkpoint"),
    (("--prompt=empty",), "empty has 0 symbols.*32"),
    (("--prompt=text",), "text has 500 symbols.*32"),
    (("--prompt=folder",), "folder"),
    (("--prompt=empty", "--given=3"), "--given and --prompt"),
    (("--given=33",), "given=33 .*32"),
  ):
    files = text_run, file("empty"), folder("folder")
    yield on_run(SAMPLE, *words, message=message, prepare=several(*files))
  for word in (
    "--min_context=-1",
    "--min_context=32",
    f"--min_context={2**70}",
    "--min_context=0,32",
  ):
    yield on_run(EVAL, word, message=word[2:13], prepare=text_run)


def preparing():
  for words, message in (
    ((), "usage.*prepare.*cifar10"),
    (("prepare",), "usage"),
    (("prepair", "cifar10"), "usage"),
    (("prepare", "mnist"), "mnist.*cifar10"),
    (("prepare", ""), "''"),
    (("prepare", "digits"), "digits.*cifar10"),
    (("prepare", "cifar10", "enwik8"), "usage"),
    (("prepare", "cifar10", "--data_dri=x"), "data_dri"),
    (("prepare", "cifar10", "--data_dir"), "data_dir"),
    (("prepare", "../cifar10"), "cifar10"),
  ):
    yield Bad(DATA, words, message)
  words = "prepare", "enwik8", "--data_dir=data"
  yield Bad(DATA, words, "data", file("data", "mine"))
  for content in b"", RANDOM, zipped(("enwik8", b"text")):
    path = "data/downloads/manual/enwik8.zip"
    message = "data/downloads.* is damaged|enwik8.zip"
    yield Bad(DATA, words, message, file(path, content))


# Folders.


def folders():
  for path, message, prepare in (
    ("file", "file", file("file", "mine")),
    ("file/new", "file/new", file("file", "mine")),
    ("/proc/nowhere", "/proc/nowhere", None),
    ("/dev/null", "/dev/null", None),
    (LONG, "long", None),
    ("fifo", "fifo", fifo("fifo")),
    ("loop", "loop", link("loop", "loop")),
  ):
    words = f"--config={DIGITS}", f"--workdir={path}"
    yield Bad(TRAIN, words, message, prepare)
  word = "--workdir=run"
  message = r"another config: .*model.width \(16 there, 128 now\).*--workdir"
  yield train(word, message=message, prepare=copy)
  for name in "lock", "config.json":
    prepare = folder(f"run/{name}")
    yield train(word, message=f"run/{name}", prepare=prepare)
  prepare = several(folder("run"), fifo("run/config.json"))
  yield train(word, message="run/config.json", prepare=prepare)
  # A damaged config of a run.
  contents = (
    *("", "{", "[]", "7", '"x"', "null", "{}", "\xff", "\0", "{" * 10, HUGE),
    *('{"data": {}}', '{"data": 7}', '{"data": null}', '{"model": 3}'),
    *("[" * 100_000, '{"a":' * 5000, "NaN", "1e999", "{'data': {}}"),
  )
  for script in EVAL, SAMPLE, REPORT, TRAIN:
    for content in contents[:: 1 if script == EVAL else 4]:
      prepare = replaced("config.json", content)
      words = (f"--config={DIGITS}",) if script == TRAIN else ()
      message = "run/config.json cannot be read"
      yield on_run(script, *words, message=message, prepare=prepare)
  for step in folder, fifo, bind, lambda name: link(name, "/dev/zero"):
    prepare = made("config.json", step)
    for script in EVAL, REPORT:
      yield on_run(script, message="config.json", prepare=prepare)
  for field, value in (
    ("model.width", "16"),
    ("model.width", -16),
    ("model.width", 10**7),
    ("model.dropout", 2),
    ("train.batch_size", 10**30),
    ("train.seed", "x"),
    ("train.stepz", 3),
    ("data.name", "mnist"),
    ("data.fractions", ["a", "b", "c"]),
    ("attention.pattern", "zigzag"),
    ("attention.pattern", ["dense"]),
    ("attention.cycle", 7),
    ("optimizer.learning_rate", float("nan")),
    ("eval.batch_size", 0),
    ("checkpoint.keep", None),
  ):
    prepare = setting(field, value)
    message = rf"{field}|another network"
    for script in EVAL, SAMPLE:
      yield on_run(script, message=message, prepare=prepare)
  # Without a checkpoint, or with damaged ones.
  for script in EVAL, SAMPLE, REPORT:
    for name in "checkpoints", "checkpoints/2", "checkpoints/2/state":
      yield on_run(script, message="no checkpoint", prepare=deleted(name))
    prepare = several(deleted("checkpoints"), file("run/checkpoints", "mine"))
    yield on_run(script, message="checkpoints?", prepare=prepare)
    prepare = made("checkpoints/2", file)
    yield on_run(script, message="checkpoints?", prepare=prepare)
  for script in EVAL, SAMPLE:
    for prepare in (
      cut("checkpoints/2/state/_METADATA"),
      cut("checkpoints/2/files.json"),
      cut("checkpoints/2/about/metadata"),
      deleted("checkpoints/2/state/_METADATA"),
      deleted("checkpoints/2/state/d"),
      deleted("checkpoints/2/files.json"),
      replaced("checkpoints/2/files.json", "[]"),
      replaced("checkpoints/2/files.json", "{}"),
      replaced("checkpoints/2/files.json", "7"),
      replaced("checkpoints/2/files.json", "[" * 100_000),
      replaced("checkpoints/2/state/_METADATA", "{}"),
      made("checkpoints/2/files.json", fifo),
      made("checkpoints/2/files.json", folder),
      made("checkpoints/2/state/_METADATA", fifo),
    ):
      message = "checkpoints/2 is damaged: "
      yield on_run(script, message=message, prepare=prepare)
  # What a page shows.
  for name, content in (
    ("evaluations/a.json", ""),
    ("evaluations/a.json", "{"),
    ("evaluations/a.json", "{}"),
    ("evaluations/a.json", "[]"),
    ("evaluations/a.json", "7"),
    ("evaluations/a.json", '{"split": "test", "step": 2}'),
  ):
    prepare = replaced(name, content)
    message = f"run/{name}".replace(".", r"\.")
    yield on_run(REPORT, message=message, prepare=prepare)
  for name in "metrics.jsonl", "report.html", "samples.png":
    prepare = several(copy, lambda run, name=name: _folder_for(name))
    yield on_run(REPORT, message=name, prepare=prepare)


def _folder_for(name: str) -> None:
  path = pathlib.Path("run") / name
  path.unlink(missing_ok=True)
  path.mkdir()


GROUPS = {
  group.__name__: tuple(group())
  for group in (
    overrides,
    of_some,
    other_types,
    config_files,
    patterns,
    flags,
    comparisons,
    data,
    preparing,
    folders,
  )
}
