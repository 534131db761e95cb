"""Inputs that commands must reject: the data of test_bad_inputs.py.

A table has one case per line: what is given and, after `=>`, a key phrase of
the error, as a regular expression. By default it is the name of the flag.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator

import numpy as np
import runs

Prepare = Callable[[pathlib.Path], object]

DIGITS = runs.DIGITS
NEW = "--workdir=new"
TRAIN, EVAL = "train.py", "eval.py"
SAMPLE, EXPLAIN, COMPARE, REPORT, DATA = (
  f"sparse_transformer/{name}.py"
  for name in ("sample", "explain", "compare", "report", "data/__main__")
)
VARY = "--vary=attention.pattern=dense,local"
# The words before a case in a table.
BASES = {
  TRAIN: (DIGITS, NEW),
  EXPLAIN: (DIGITS,),
  COMPARE: (DIGITS, NEW, VARY),
  EVAL: ("--workdir=run",),
  SAMPLE: ("--workdir=run",),
  REPORT: ("--workdir=run",),
  DATA: ("prepare",),
}


@dataclasses.dataclass(frozen=True)
class Bad:
  """An input that a command must reject.

  Attributes:
    script: the command.
    words: its arguments; files are relative to the current folder.
    phrase: a regular expression that the error must match.
    prepare: makes files in the current folder, which is empty. It is called
      with the workdir of a run of two steps, which it may copy.
  """

  script: str
  words: tuple[str, ...]
  phrase: str
  prepare: Prepare | None = None


def bad(
  script: str, *words: str, phrase: str, prepare: Prepare | None = None
) -> Bad:
  """A case for a command, after its usual words; by default on a copy."""
  if BASES[script] == ("--workdir=run",):
    prepare = prepare or copy
  return Bad(script, (*BASES[script], *words), phrase, prepare)


def rows(table: str) -> Iterator[tuple[str, str]]:
  """(what is given, key phrase) of each line."""
  for line in table.strip().splitlines():
    given, _, phrase = map(str.strip, line.partition("=> "))
    name = given.removeprefix("--").removeprefix("config.").partition("=")[0]
    yield given, phrase or re.escape(name)


# What `prepare` may be: files and folders, good and bad.


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


def deleted(name: str) -> Prepare:
  """A copy of the run without a file or folder."""

  def prepare(run):
    copy(run)
    path = pathlib.Path("run") / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

  return prepare


def replaced(name: str, content: str | bytes) -> Prepare:
  """A copy of the run in which a file has other contents."""
  return several(copy, file(f"run/{name}", content))


def made(name: str, step: Callable[[str], Prepare]) -> Prepare:
  """A copy of the run in which a path is a file or a folder instead."""
  return several(deleted(name), step(f"run/{name}"))


def cut(name: str) -> Prepare:
  """A copy of the run in which a file has lost its second half."""

  def prepare(run):
    copy(run)
    (path,) = pathlib.Path("run").glob(name)
    os.truncate(path, path.stat().st_size // 2)

  return prepare


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


# Flags, and fields of a config as flags.

WORDS = {
  TRAIN: r"""
--workdir=gs://bucket/run             => not a local folder
--workdir=run[1]                      => must not contain \[
-w                                    => 'w'
--workdir
--workdir=                            => --workdir.* is empty
--replay=0
--replay=last                         => replay.*last
--replay=3                            => new is not a run
--coordinator=host:1                  => --num_processes and --process_id must
--process_id=-1
--distributed=yes
--verbosity=loud
--flagfile=nowhere                    => nowhere
--config.attention.patern=fixed       => patern
--config.train.batch-size=8
--config.train.steps[0]=8             => steps
--config.train.steps
--config.data.name=mnist              => 'mnist'.*digits
--config.model.num_layers=0           => num_layers=0 must be
--config.model.num_layers=many
--config.model.width=10000000         => parameters .*model.width=10000000
--config.model.half_size=maybe
--config.model.dropout=nan
--config.model.dtype=float8           => float8.*float32, bfloat16
--config.attention.mode=mixed         => 'mixed'.*interleaved, merged, heads
--config.attention.cycle=(0,2)        => \(0, 2\).*0 to 1
--config.attention.cycle=(0
--config.attention.stride=65          => stride=65 .* the 64 positions
--config.attention.backend=fast       => 'fast'.*auto.*dense
--config.optimizer.learning_rate=1e400
--config.optimizer.adam_learning_rate=0.01 => is for optimizer.name=muon
--config.optimizer.warmup_steps=700   => warmup_steps=700 .*train.steps=700
--config.train.steps=
--config.train.batch_size=1000000000
--config.eval.batch_size=1000000000
--config.data.name=bytes --config.data.length=2147483647 => 2147483647 positions
--config.data.name=bytes --config.data.columns=2147483647 => of 2147483647 rows
--config.data.symbols=257             => symbols=257 .* below 257
--config.data.noise=1.5               => noise=1.5 .* at most 1
--config.data.pairs=0                 => pairs=0 .* at least 1
--config.data.name=repeat --config.data.period=0 => period=0 .* at least 1
--config.data.name=repeat --config.data.period=1024 => =1024 must be less
--config.data.name=repeat --config.data.columns=96 => a multiple of .*=96
--config.data.name=recall --config.data.length=62 => at most 15
--config.data.name=recall --config.data.columns=96 => a multiple of .*=96
--config.train.accumulation=3         => batch_size=16 .*accumulation=3
--config.mesh.fsdp=7
--config.mesh.tensor=all
""",
  EVAL: r"""
--config.train.stepz=3                => stepz
--split=tests                         => tests.*train.*validation.*test
--weights=best                        => best.*ema
--min_context=3                       => min_context=3 must be 0 for images
--min_context=                        => --min_context is empty; see --help
--step=                               => --step is empty; see --help
--min_context=0,
--step=last                           => step=last
--step=99                             => no checkpoint of step 99.* 2$
--step=2,,2                           => step=2,,2
--step=2,2                            => --step=2,2 must be integers, each of
--step=best,2                         => --step=best,2 must be integers
--config=other.py                     => other.py
--config.eval.batch_size=0            => eval.batch_size=0
--config.eval.batch_size=1000000000   => eval.batch_size=1000000000 with
--config.model.width=32               => another network.*config.json
--config.attention.backend=triton     => needs an NVIDIA GPU
--config.attention.backend=mosaic     => needs a TPU
""",
  SAMPLE: r"""
--num=0                               => num=0
--num=1000000000                      => num=1000000000 with sequences of
--num=1000000000 --nocache            => num=1000000000 with sequences of
--num=1000000000 --given=3            => num=1000000000 with sequences of
--num=1180591620717411303424          => with sequences of 64 positions needs
--temperature=-1                      => temperature=-1
--temperature=inf                     => temperature=inf
--temperature=nan                     => temperature=nan
--temperature=1e-40                   => temperature=1e-40
--top_k=-1                            => top_k=-1
--top_p=0                             => top_p=0
--top_p=nan                           => top_p=nan
--top_p=1e-50                         => top_p=1e-50
--top_p=1.1                           => top_p=1.1
--seed=4294967296                     => seed=4294967296
--given=3 --prompt=x                  => cannot be combined
--seed=99999999999999999999           => seed=99999999999999999999
--step=99                             => no checkpoint of step 99
--step=all                            => step.*all
--given=-1                            => given=-1
--given=65                            => given=65 .*64
--prompt=                             => --prompt is empty; see --help
--prompt=text                         => --prompt is for text
--cache=maybe
""",
  EXPLAIN: r"""
--jsn
--out=                                => --out is empty; see --help
--out=/proc/nowhere                   => /proc/nowhere
--config.train.accumulation=3         => accumulation=3
--config.attention.pattern=Full()     => later key
--target=                             => --target is empty
--target=h1000                        => unknown target 'h1000'; known: .*h100
--target=h100:8                       => such as h100:1x1x8
--target=v5e:8x8                      => batch_size=16.*mesh.data=64
--part=attention                      => --part.*--target
--step=best                           => --step requires --example
--example=1                           => requires --workdir
""",
  COMPARE: r"""
--workdir=gs://bucket/run             => not a local folder
--workdir=run[1]                      => must not contain \[
--varry=x
--vary=                               => --vary is empty; see --help
--vary=pattern                        => no field 'pattern'
--vary=attention.patern=dense         => no field 'attention.patern'
--vary=attention.pattern              => different values
--vary=attention.pattern=dense,,local => different values
--vary=attention.pattern=dense,dense  => different values
--vary=train.seed=1,2                 => train.seed itself; use --seeds
--vary=attention.pattern=dense,zigzag => zigzag
--vary=attention.cycle=(0,),(2,)      => cycle.*2
--vary=attention.stride=8,65          => attention.stride=65
--vary=train.steps=2,4                => train.steps itself; use --budget
--vary=train.accumulation=1,3         => accumulation=3
--vary=model.width=16,10000000        => model.width=10000000
--vary=model.width=__import__('os')   => model.width
--vary=data.name=digits,mnist         => mnist
--budget=500                          => --budget=500
--budget=steps:x                      => --budget=steps:x
--budget=hours:3                      => --budget=hours:3
--seeds=0                             => seeds=0
--workdir=/proc/nowhere               => /proc/nowhere
""",
  DATA: r"""
mnist                                 => mnist.*cifar10
digits                                => digits.*cifar10
../cifar10                            => cifar10
""",
}


# About the heads of a run.
HEADS = r"""
--example=200                 => --example=200 must be less than 200
--example=1 --temperature=0   => --temperature=0
--example=1 --temperature=nan => --temperature=nan
--example=1 --temperature=1e300 => --temperature=1e
--example=1 --step=7          => 7
--example=1 --target=h100     => cannot be combined
"""


def words():
  for script, table in WORDS.items():
    for given, phrase in rows(table):
      yield bad(script, *re.split(" (?=--)", given), phrase=phrase)
  for given, phrase in rows(HEADS):
    line = "--workdir=run", *given.split()
    yield Bad(EXPLAIN, line, phrase, copy)
  for script in TRAIN, EVAL, SAMPLE, EXPLAIN, COMPARE, REPORT:
    yield bad(script, "more", phrase="unexpected argument 'more'")
    yield bad(script, "--wrokdir=there", phrase="wrokdir")
  for script in TRAIN, EXPLAIN:
    yield Bad(script, (NEW,) * (script == TRAIN), "--config is missing")
  for script in TRAIN, COMPARE:
    given = (DIGITS, VARY) if script == COMPARE else (DIGITS,)
    yield Bad(script, given, "--workdir is missing")
  yield Bad(COMPARE, (DIGITS, NEW), "--vary is missing")
  for script in EVAL, SAMPLE, REPORT:
    yield Bad(script, (), "--workdir is missing")
  for script in EVAL, SAMPLE, REPORT, EXPLAIN:
    yield Bad(script, ("--workdir=",), "--workdir|run")
    yield Bad(script, ("--workdir=nowhere",), "nowhere is not a run.*train.py")
  for given in (), ("prepare",), ("prepair", "cifar10"):
    yield Bad(DATA, given, "usage.*prepare.*cifar10")
  yield bad(TRAIN, f"--config.train.steps={'9' * 5000}", phrase="train.steps")
  yield bad(TRAIN, f"--config.{'x' * 5000}=1", phrase="xxx")


# Expressions; `tests/patterns/test_named.py` has more.
PATTERNS = r"""
zigzag                    => 'zigzag'.*dense, local, strided, fixed
()                        => \(\)
Local(3) + Local(4)       => \+
__import__('os').system('touch new') => __import__
Local(print('hello'))     => print
Local(0)                  => Local\(0\).*at least 1
LSH(8, 4, 1000000)        => rounds must be at most
Routing(4, 8) - Routing(4, 8) => subtracts Routing\(4, 8\) from itself
Local(3                   => never closed
~Local(3)                 => Full\(\) - Local\(3\)
RandomBlocks(3, 100000)   => RandomBlocks.*100000
TopBlocks(64, 2)          => TopBlocks\(64, 2\) can have no pairs among 64
(Local(3), Full())        => later key.*& Causal\(\)
Local(3) - Causal()       => Local\(3\) - Causal\(\)
"""


def patterns():
  cases = [
    *rows(PATTERNS),
    ("", "''"),
    ("(" * 5000, "pattern"),
    (" | ".join(f"Strided({k})" for k in range(1, 301)), "pattern"),
    ("Local(\uff13)\udcff", "pattern|surrogates"),
  ]
  for text, phrase in cases:
    yield bad(TRAIN, f"--config.attention.pattern={text}", phrase=phrase)


# Config files.

# One that starts with the digits' settings as a dictionary.
EDITED = """
from configs import digits
from ml_collections import ConfigDict
def get_config():
  settings = digits.get_config().to_dict()
  {}
  return ConfigDict(settings)
"""
EDITS = r"""
del settings['eval']                      => '?eval'?
del settings['train']['steps']            => train.steps
settings['train']['steps'] = 'many'       => train.steps='many' must be
settings['model']['half_size'] = 2        => model.half_size=2 must be
settings['model'] = None                  => model
settings = {'model': settings}            => lacks
"""
CONFIG_FILES = (
  ("", "get_config"),
  ("def get_config(:", "config.py|invalid syntax"),
  ("\0\1\2", "config.py|null byte"),
  ("import no_such_module", "no_such_module"),
  ("raise ValueError('a\\nb')", "a b"),
  ("def get_config(): return get_config()", "recursion|deep"),
  ("def get_config(): return 1 / 0", "division by zero"),
  ("def get_config(size): return size", "size"),
  *(
    (f"def get_config(): {result}", "config is of type .* must be a ConfigDict")
    for result in ("pass", "return 7", "return {}", "yield 1")
  ),
)


def config_files():
  edits = [(EDITED.format(edit), phrase) for edit, phrase in rows(EDITS)]
  for number, (content, phrase) in enumerate((*CONFIG_FILES, *edits)):
    for script in (TRAIN, EXPLAIN, COMPARE)[: 1 if number % 6 else 3]:
      given = [word for word in BASES[script] if word != DIGITS]
      prepare = file("config.py", content)
      yield Bad(script, ("--config=config.py", *given), phrase, prepare)
  for path, phrase in (
    ("", "config file is an empty"),
    (".", "."),
    ("none", "none"),
  ):
    yield Bad(TRAIN, (f"--config={path}", NEW), phrase)


# Files of data.


RANDOM = np.random.RandomState(0).bytes(3000)
some_text = file("text", b"some text " * 100)
# data.name, data.path, key phrase, and what is there.
DATA_FILES: tuple[tuple[str, str, str, Prepare | None], ...] = (
  ("bytes", "", "data.path", None),
  ("bytes", "nowhere", "nowhere.*data.path", None),
  ("bytes", "/dev/zero", "/dev/zero is not a regular file", None),
  ("bytes", "folder", "folder has no file", folder("folder")),
  ("bytes", "text", "data.length=32", file("text", b"short " * 3)),
  ("bytes", "a.gz", "a.gz is damaged", file("a.gz", b"text" * 100)),
  ("fasta", "a.fa", "a.fa is not a FASTA", file("a.fa", b"ACGT" * 100)),
  ("audio", "a.wav", "a.wav is damaged", file("a.wav", RANDOM)),
  ("text8", "text", "text has 1,000 .*text8 has", some_text),
  ("enwik8", "folder", "folder.*prepare enwik8", folder("folder")),
  ("cifar10", "folder", "folder.*prepare cifar10", folder("folder")),
  ("imagenet64", "folder", "where TensorFlow is installed", folder("folder")),
  (
    "imagenet64",
    "npy",
    "64.npy is damaged",
    file("npy/train_64x64.npy", RANDOM),
  ),
)


def data():
  small = "--config.data.length=32", "--config.data.columns=8"
  for name, path, phrase, prepare in DATA_FILES:
    words = f"--config.data.name={name}", f"--config.data.path={path}"
    yield bad(TRAIN, *words, *small, phrase=phrase, prepare=prepare)
  # Other commands read the same files.
  damaged = file("a.gz", RANDOM)
  for path, phrase, step in (
    ("nowhere", "nowhere", text_run),
    ("a.gz", "a.gz is damaged", several(text_run, damaged)),
  ):
    word = f"--config.data.path={path}"
    yield bad(EVAL, word, phrase=phrase, prepare=step)
    yield bad(SAMPLE, f"--prompt={path}", phrase=phrase, prepare=step)
  for word, phrase in (
    ("--prompt=empty", "empty has 0 symbols.*32"),
    ("--prompt=text", "text has 500 symbols.*32"),
    ("--given=33", "given=33 .*32"),
  ):
    prepare = several(text_run, file("empty"))
    yield bad(SAMPLE, word, phrase=phrase, prepare=prepare)
  for numbers in "-1", "32", "0,32", "1,7,1":
    word = f"--min_context={numbers}"
    yield bad(EVAL, word, phrase="min_context=", prepare=text_run)
  archive = "data/downloads/manual/enwik8.zip"
  for path, phrase in ("data", "data"), (archive, "enwik8.zip.* is damaged"):
    words = "enwik8", "--data_dir=data"
    yield bad(DATA, *words, phrase=phrase, prepare=file(path, b"mine"))


# Folders of runs.


def folders():
  for path, prepare in (
    ("file", file("file", "mine")),
    ("file/new", file("file", "mine")),
    ("link", lambda run: pathlib.Path("link").symlink_to("nowhere")),
    ("/proc/nowhere", None),
    ("x" * 5000, None),
  ):
    words = DIGITS, f"--workdir={path}"
    yield Bad(TRAIN, words, path[:9] if prepare else "long|nowhere", prepare)
  onto = "--workdir=run"
  phrase = r"another config: .*model.width \(16 there, 128 now\).*--workdir"
  yield Bad(TRAIN, (DIGITS, onto), phrase, copy)
  for name in "lock", "config.json":
    prepare = folder(f"run/{name}")
    yield Bad(TRAIN, (DIGITS, onto), f"run/{name}", prepare)
  yield Bad(TRAIN, (DIGITS, "--workdir=new\udcff"), "is not UTF-8")
  yield Bad(TRAIN, ("--config=~/nowhere.py", NEW), f"{os.path.expanduser('~')}")
  for name in "config.json", "metrics.jsonl":
    prepare = made(name, lambda path: lambda run: os.mkfifo(path))
    yield bad(REPORT, phrase=f"{name} is not a regular", prepare=prepare)
  yield bad(SAMPLE, "--prompt=hello", phrase="--prompt=hello|real images")
  words = "--distributed=auto", "--coordinator=localhost:1"
  yield bad(TRAIN, *words, phrase="give either it or them")
  yield bad(TRAIN, "--heartbeat_seconds=99999999999", phrase="in the range")
  prepare = file("new/lock", "mine")
  yield bad(TRAIN, phrase="new/lock is not the lock", prepare=prepare)
  yield bad(COMPARE, phrase="new", prepare=file("new", "mine"))
  yield bad(COMPARE, phrase="holds a run", prepare=file("new/config.json"))
  for content in "", "7", "[1]", "{}", '{"seeds": 2}':
    prepare = file("new/comparison-of.json", content)
    phrase = "comparison-of.json|another comparison"
    yield bad(COMPARE, phrase=phrase, prepare=prepare)
  # A damaged config of a run.
  contents = "", "\0", "{", "[]", "null", "5", '"data"', "{}", '{"data": 7}'
  for content in *contents, "[" * 100_000:
    phrase, prepare = "run/config.json", replaced("config.json", content)
    yield bad(EVAL, phrase=f"{phrase} cannot be read", prepare=prepare)
  for script in SAMPLE, REPORT:
    prepare = replaced("config.json", "{")
    yield bad(script, phrase="run/config.json cannot be read", prepare=prepare)
  for field, value in (
    ("model.width", 32),
    ("train.seed", "x"),
    ("train.stepz", 3),
    ("data.name", "mnist"),
    ("optimizer.learning_rate", float("nan")),
  ):
    prepare = setting(field, value)
    yield bad(EVAL, phrase=f"{field}|another network", prepare=prepare)
  # Without a checkpoint, or with damaged ones.
  for script in EVAL, SAMPLE, REPORT:
    for name in "checkpoints", "checkpoints/2":
      yield bad(script, phrase="no checkpoint", prepare=deleted(name))
    prepare = made("checkpoints", file)
    yield bad(script, phrase="checkpoints?", prepare=prepare)
  for prepare in (
    cut("checkpoints/2/state/_METADATA"),
    cut("checkpoints/2/files.json"),
    cut("checkpoints/2/about/metadata"),
    deleted("checkpoints/2/state"),
    deleted("checkpoints/2/state/d"),
    deleted("checkpoints/2/files.json"),
    replaced("checkpoints/2/files.json", "[]"),
    made("checkpoints/2/files.json", folder),
  ):
    for script in EVAL, SAMPLE:
      phrase = "checkpoints/2 is damaged: "
      yield bad(script, phrase=phrase, prepare=prepare)
  # What a page shows.
  for content in "", "{", "7", '{"split": "test", "step": 2}':
    prepare = replaced("evaluations/a.json", content)
    yield bad(REPORT, phrase=r"run/evaluations/a\.json", prepare=prepare)
  for name in "metrics.jsonl", "report.html", "samples.png":
    yield bad(REPORT, phrase=name, prepare=made(name, folder))


GROUPS = {
  group.__name__: tuple(group())
  for group in (words, patterns, config_files, data, folders)
}
