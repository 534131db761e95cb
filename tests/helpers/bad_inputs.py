"""Inputs that commands must reject: bad_inputs.txt.

Each line of the text file is a command and, after `=>`, a phrase of its error,
in which ` ... ` stands for anything. A case gets those of the files and runs
below that its words name.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import scipy.io.wavfile
from helpers import released, runs

Content = str | bytes | dict | Callable[[pathlib.Path], object] | None


class Bad(NamedTuple):
  """A command that must fail, and a regular expression of its error."""

  name: str
  script: str
  words: tuple[str, ...]
  phrase: str


def cases() -> Iterator[Bad]:
  """The lines of the text file, named by group and line."""
  text = pathlib.Path(__file__).with_suffix(".txt").read_text("utf-8")
  for number, line in enumerate(text.splitlines(), start=1):
    if line.startswith("# "):
      group = line[2:].lower().replace(" ", "-")
    elif line:
      given, _, phrase = line.rpartition(" => ")
      given = given.replace("--config=configs", f"--config={runs.REPO}/configs")
      script, *words = shlex.split(given)
      phrase = ".*".join(map(re.escape, phrase.split(" ... ")))
      yield Bad(f"{group}-{number}", script, tuple(words), phrase)


def prepare(words: tuple[str, ...], run: pathlib.Path) -> None:
  """Makes what words name, in the current folder, from a run of two steps."""
  given = " ".join(words)
  pathlib.Path("files").mkdir()
  named = set(re.findall(r"(?<![/\w])files/([\w./-]+)", given))
  if re.search("=runs/(text|dna)", given):
    named.add("text")
  if "=runs/labels" in given:
    named.add("l/good")
  named |= {name.removesuffix("/below") for name in named}
  for path, content in FILES.items():
    if any(f"{path}/".startswith(f"{x}/") for x in named):
      _write(pathlib.Path("files", path), content)
  if re.search(r"=run\b", given):
    shutil.copytree(run, "run")
  for name in re.findall(r"=runs/(\w+)", given):
    _make_run(run, name)


def _make_run(run, name):
  part, _, kind = name.partition("_")
  path, content = RUNS.get(name) or (PATHS[part], CONTENTS[kind])
  workdir = pathlib.Path("runs", name)
  if name == "text":
    return runs.untrained(workdir, runs.text(pathlib.Path("files/text")))
  if name == "labels":
    path = pathlib.Path("files/l/good")
    changes = {"data.name": "labelled", "model.task": "classify"}
    return runs.untrained(workdir, runs.text(path, **changes))
  if not name.startswith("comparison"):
    shutil.copytree(run, workdir)
  path = workdir / path
  if isinstance(content, dict):
    settings = json.loads(path.read_text())
    for field, value in content.items():
      group, _, key = field.partition(".")
      settings.update({group: settings[group] | {key: value} if key else value})
    content = json.dumps(settings)
  if path != workdir:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
  _write(path, content)


def _write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  if callable(content):
    content(path)
  elif content is not None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def _link(target):
  return lambda path: path.symlink_to(target)


def _flip(path):
  """Makes warmup_steps another name, by a single bit."""
  path.write_bytes(path.read_bytes().replace(b"warmup_st", b"warmup_su"))


def _released(name="", value=lambda x: None, cut=0, **sizes):
  """A released file that fits `runs.tiny`, but for an array or its sizes."""

  def write(path):
    fitting = dict(layers=1, half=False, shape=(8, 8), vocab=17)
    arrays = released.arrays(**fitting | sizes)
    if name:
      new = value(arrays.pop(f"model/{name}/Ema/ema:0"))
      arrays |= {} if new is None else {f"model/{name}/Ema/ema:0": new}
    np.savez(path, **arrays)
    os.truncate(path, path.stat().st_size - cut)

  return write


def _array(array):
  def write(path):
    with path.open("wb") as file:
      np.save(file, array) if path.suffix == ".npy" else np.savez(file, array)

  return write


def _sound(samples):
  return lambda path: scipy.io.wavfile.write(path, 12_000, samples)


HEADER = b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'


def _config(line):
  return (
    "from configs import digits\n"
    "def get_config():\n"
    "  config = digits.get_config()\n"
    f"  {line}\n"
    "  return config\n"
  )


CONFIGS = dict(
  syntax="def get_config(:",
  raises=_config("1 / 0"),
  exits="raise SystemExit",
  returns_none="get_config = lambda: None",
  unheard="class Own(BaseException): pass\nraise Own('why')",
  silent="class Own(Exception):\n  __str__ = None\nraise Own",
  imports="import no_such_module",
  dict="def get_config(): return dict(model={})",
  module="from configs import digits\nget_config = lambda: type",
  argument="def get_config(size): return size",
  typo=_config("config.model.widht = 64"),
  text_number=_config("config.model.width = 'wide'"),
  more=_config("config.train.wandb = True"),
  none_field=_config("config.model.width = None"),
  nul="\0",
  nan=_config("config.optimizer.learning_rate = float('nan')"),
  newline="raise ValueError('a\\nb')",
  untyped_text=_config(
    "with config.ignore_type(): config.train.steps = 'many'"
  ),
  no_group=_config("config.model = None"),
)
FILES: dict[str, Content] = {
  **{f"c/{name}.py": content for name, content in CONFIGS.items()},
  "c/interrupted.json": '{"model"',
  "tiny.py": "from helpers import runs\n"
  "def get_config(): return runs.tiny(**{'train.steps': 2})",
  "empty": "",
  "text": "the quick brown fox.\n" * 1000,
  "letters": "abc" * 10_000,
  "tiny": "short",
  "t/tokens.bin": bytes(9000),
  "t/wide.npy": _array(np.zeros(4500, np.uint32)),
  "t/wide.bin": np.arange(4500, dtype="<u4").tobytes(),
  "t/header.bin": np.array([20240520, 1, 4500], "<i4").tobytes() + bytes(9012),
  "p/flat.npy": _array(np.zeros((9, 192), np.uint8)),
  "p/x.npz": _array(np.zeros((9, 8, 8), np.uint8)),
  "s/stereo.wav": _sound(np.zeros((9, 2), np.int16)),
  "s/scaled.wav": _sound(np.full(9, 32768.0)),
  **{f"l/good/{x}/{k}": "text" for x in ("no", "yes") for k in range(40)},
  **{f"l/other/{x}/{k}": "text" for x in "ab" for k in range(40)},
  "zeros": "abc\0" * 1000,
  "hollow": pathlib.Path.mkdir,
  "folder.safetensors": pathlib.Path.mkdir,
  "fifo.safetensors": os.mkfifo,
  "broken.safetensors": "words",
  "other.safetensors": b"\2" + bytes(7) + b"{}",
  "cut.safetensors": bytes([len(HEADER)]) + bytes(7) + HEADER,
  "n/good.npz": _released(),
  "n/cut.npz": _released(cut=400),
  "n/lacks.npz": _released("h0/v_proj/b"),
  "n/gap.npz": _released("h1/v_proj/b", layers=3),
  "n/no_start.npz": _released("sos_token/sos"),
  "n/more.npz": _released(layers=2),
  "n/deep.npz": _released(layers=33, width=2),
  "n/wide.npz": _released(width=32),
  "n/odd.npz": _released("we", lambda x: x[0, 0]),
  "n/float16.npz": _released("we", np.float16),
  "n/nan.npz": _released("h0/mlp/b", lambda x: x + np.nan),
  "n/pickle.npz": _released("final_norm/g", lambda x: x.astype(object)),
  "n/words.npz": "words",
  "n/fifo.npz": os.mkfifo,
  "fifo": os.mkfifo,
  "with_fifo/pipe": os.mkfifo,
  "dangling.py": _link("nowhere"),
  "with_dangling/dangling": _link("nowhere"),
  "loop": _link("loop"),
  **{f"text.{suffix}": "text" * 100 for suffix in ("gz", "bz2", "xz", "zip")},
  "cut.gz": b"\x1f\x8b\x08\0\0\0\0\0\0\3KL",
  "bad_info/cifar10_bytes/1.1.0/dataset_info.json": "{",
  "bad_records/cifar10/3.0.2/cifar10-train.array_record-00000-of-00001": "junk",
}
LAST = "checkpoints/2"
# A path in a copy of the run, and what is there instead: of any other name, as
# of state_gone, the path and the content are those of its parts.
RUNS: dict[str, tuple[str, Content]] = dict(
  text=("", None),
  labels=("", None),
  dna=("config.json", {"data.name": "fasta", "data.path": "files/text"}),
  comparison=("comparison-of.json", "{}"),
  config_group_null=("config.json", {"model": None}),
  config_group_text=("config.json", {"model": "small"}),
  config_text=("config.json", {"model.width": "wide"}),
  config_nan=("config.json", {"model.dropout": float("nan")}),
  config_null_field=("config.json", {"model.width": None}),
  config_huge=("config.json", {"model.num_layers": 10**12}),
  config_source=("config.json", {"data.name": "toys"}),
  config_wider=("config.json", {"model.width": 32}),
  config_seed=("config.json", {"data.name": "stdlib", "data.length": 64}),
  step_renamed=("", lambda run: (run / LAST).rename(run / "checkpoints/3")),
  evaluation_words=("evaluations/a.json", '{"step": "two"}'),
  about_flipped=("", lambda run: _flip(run / LAST / "about/metadata")),
)
PATHS = dict(
  comparison="comparison-of.json",
  config="config.json",
  checkpoints="checkpoints",
  checkpoint=LAST,
  files=f"{LAST}/files.json",
  about=f"{LAST}/about/metadata",
  state=f"{LAST}/state",
  arrays=f"{LAST}/state/d",
  metrics="metrics.jsonl",
  lock="lock",
  evaluation="evaluations/a.json",
  picture="patterns.png",
  samples="samples.png",
  report="report.html",
  changes="config_changes.jsonl",
  origin="samples.json",
)
CONTENTS: dict[str, Content] = dict(
  gone=None,
  empty="",
  cut='{"about": {',
  null="null",
  list="[1]",
  number="7",
  nul="\0",
  deep="[" * 100_000,
  latin1=b'{"data": "\xe9"}',
  words="mine",
  fifo=os.mkfifo,
  folder=pathlib.Path.mkdir,
)
