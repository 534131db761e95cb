"""Inputs that commands must reject: bad_inputs.txt, and the files they name.

A line of the text file is a case: a command, `=>`, and a phrase of the one line
that the command must print, in which ` ... ` stands for anything.

    + eval.py --workdir=runs/config_cut => config.json cannot be read

`make test` runs the lines that begin with `+`, and `make soak` all of them. A
new case is one line if its words name what is here; else it also needs an entry
in a table below.

What words name is made for the case, in an empty folder in which the command
runs; nothing else is there, and the command must leave it as it was:

    run               a run of the digits with checkpoints at step 2
    runs/text         a run on text that was not trained; also runs/labels
    runs/dna          a copy of `run`, changed as the table `CHANGED` says
    runs/config_cut   a copy of `run` with other content (`CONTENTS`) in a place
                      (`PLACES`); any two of their names make one
    runs/comparison   the folder of another comparison
    files/text        an entry of `FILES`; a folder stands for all that is below
    new               what does not exist, and what the command would write

The groups of the text file, by the headings in it:

    Command lines         flags that are missing, unknown, empty or given twice
    Config files          files/c: programs that fail, or return no config
    Values of fields      numbers, names and settings that do not go together
    Patterns, Expressions texts that are no pattern, or not one of this network
    explain               its flags, targets and examples
    Workdirs              folders that are no run, and damaged runs
    eval and sample       steps, contexts, prompts and temperatures
    export                files that cannot be written
    Data                  texts, archives, sounds: files/text, files/s, ...
    compare               values to vary, budgets, grids and jobs
    Several processes     coordinators and numbers of processes
    Starts, changes       runs to start from, and --allow_changes
    More command lines    and More files: of the groups above, found later
    Tokens and pictures   files/t and files/p
    Orders of images      data.orders, --order
    Labels                files/l: folders of classes
    Released weights      files/n: arrays that others released

All but the last four groups are by someone who had not seen the cases of the
project; equal ones lent their phrases.
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

Content = str | bytes | Callable[[pathlib.Path], object] | None
Change = Callable[[pathlib.Path], object]  # of a workdir


class Bad(NamedTuple):
  """A command that must fail, and a regular expression of its error."""

  name: str
  script: str
  words: tuple[str, ...]
  phrase: str
  is_quick: bool  # whether `make test` runs it


def cases() -> Iterator[Bad]:
  """The lines of the text file, named by group and line."""
  text = pathlib.Path(__file__).with_suffix(".txt").read_text("utf-8")
  for number, line in enumerate(text.splitlines(), start=1):
    if line.startswith("# "):
      group = line[2:].lower().replace(" ", "-")
    elif line:
      yield _parse(line, f"{group}-{number}")


def _parse(line, name):
  command, _, phrase = line.removeprefix("+ ").rpartition(" => ")
  command = command.replace("--config=configs", f"--config={runs.REPO}/configs")
  script, *words = shlex.split(command)
  return Bad(
    name=name,
    script=script,
    words=tuple(words),
    phrase=".*".join(map(re.escape, phrase.split(" ... "))),
    is_quick=line.startswith("+ "),
  )


def prepare(words: tuple[str, ...], run: pathlib.Path) -> None:
  """Makes what words name, in the current folder, from a run of two steps."""
  command = " ".join(words)
  named = set(re.findall(r"(?<![/\w])files/([\w./-]+)", command))
  if re.search("=runs/(text|dna)", command):
    named.add("text")
  if "=runs/labels" in command:
    named.add("l/good")
  named |= {name.removesuffix("/below") for name in named}

  pathlib.Path("files").mkdir()
  for path, content in FILES.items():
    if any(f"{path}/".startswith(f"{name}/") for name in named):
      _write(pathlib.Path("files", path), content)

  if re.search(r"=run\b", command):
    shutil.copytree(run, "run")
  for name in re.findall(r"=runs/(\w+)", command):
    _make_run(run, name)


def _make_run(run, name):
  workdir = pathlib.Path("runs", name)
  if name in UNTRAINED:
    runs.untrained(workdir, UNTRAINED[name]())
    return

  part, _, kind = name.partition("_")
  if part != "comparison":
    shutil.copytree(run, workdir)
  change = CHANGED.get(name) or _replace(PLACES[part], CONTENTS[kind])
  change(workdir)


def _write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  if callable(content):
    content(path)
  elif content is not None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


# Changes of a run.


def _replace(name: str, content: Content) -> Change:
  """Puts content in the place of a file or folder of the run."""

  def change(workdir):
    path = workdir / name
    if path.is_dir():
      shutil.rmtree(path)
    path.unlink(missing_ok=True)
    _write(path, content)

  return change


def _set(name: str, value: object) -> Change:
  """Gives a field of config.json, or a whole group, a value."""

  def change(workdir):
    path = workdir / "config.json"
    settings = json.loads(path.read_text())
    group, _, field = name.partition(".")
    if field:
      settings[group][field] = value
    else:
      settings[group] = value
    path.write_text(json.dumps(settings))

  return change


def _read_dna(workdir):
  _set("data.name", "fasta")(workdir)
  _set("data.path", "files/text")(workdir)


def _read_a_library(workdir):
  _set("data.name", "stdlib")(workdir)
  _set("data.length", 64)(workdir)


def _flip_a_bit(workdir):
  """Makes warmup_steps another name, by a single bit."""
  path = workdir / LAST / "about/metadata"
  path.write_bytes(path.read_bytes().replace(b"warmup_st", b"warmup_su"))


LAST = "checkpoints/2"
UNTRAINED = {
  "text": lambda: runs.text(pathlib.Path("files/text")),
  "labels": lambda: runs.text(
    pathlib.Path("files/l/good"),
    **{"data.name": "labelled", "model.task": "classify"},
  ),
}
CHANGED: dict[str, Change] = {
  "about_flipped": _flip_a_bit,
  "comparison": _replace("comparison-of.json", "{}"),
  "config_group_null": _set("model", None),
  "config_group_text": _set("model", "small"),
  "config_huge": _set("model.num_layers", 10**12),
  "config_nan": _set("model.dropout", float("nan")),
  "config_null_field": _set("model.width", None),
  "config_seed": _read_a_library,
  "config_source": _set("data.name", "toys"),
  "config_text": _set("model.width", "wide"),
  "config_wider": _set("model.width", 32),
  "dna": _read_dna,
  "evaluation_words": _replace("evaluations/a.json", '{"step": "two"}'),
}
PLACES = {
  "about": f"{LAST}/about/metadata",
  "arrays": f"{LAST}/state/d",
  "changes": "config_changes.jsonl",
  "checkpoint": LAST,
  "checkpoints": "checkpoints",
  "comparison": "comparison-of.json",
  "config": "config.json",
  "evaluation": "evaluations/a.json",
  "files": f"{LAST}/files.json",
  "lock": "lock",
  "metrics": "metrics.jsonl",
  "origin": "samples.json",
  "picture": "patterns.png",
  "report": "report.html",
  "samples": "samples.png",
  "state": f"{LAST}/state",
}
CONTENTS: dict[str, Content] = {
  "cut": '{"about": {',
  "deep": "[" * 100_000,
  "empty": "",
  "fifo": os.mkfifo,
  "folder": pathlib.Path.mkdir,
  "gone": None,
  "latin1": b'{"data": "\xe9"}',
  "list": "[1]",
  "nul": "\0",
  "null": "null",
  "number": "7",
  "words": "mine",
}


# Files.


def _link(target):
  return lambda path: path.symlink_to(target)


def _array(array):
  def write(path):
    with path.open("wb") as file:
      np.save(file, array) if path.suffix == ".npy" else np.savez(file, array)

  return write


def _sound(samples):
  return lambda path: scipy.io.wavfile.write(path, 12_000, samples)


def _released(name="", value=lambda x: None, cut=0, **sizes):
  """A released file that fits `runs.tiny`, but for an array or its sizes."""

  def write(path):
    fitting = dict(
      layers=1,
      half=False,
      shape=(8, 8),
      vocab=17,
    )
    arrays = released.arrays(**fitting | sizes)
    if name:
      new = value(arrays.pop(f"model/{name}/Ema/ema:0"))
      if new is not None:
        arrays[f"model/{name}/Ema/ema:0"] = new

    np.savez(path, **arrays)
    os.truncate(path, path.stat().st_size - cut)

  return write


def _config(line):
  """A config file of the digits with a line of its own."""
  return (
    "from configs import digits\n"
    "def get_config():\n"
    "  config = digits.get_config()\n"
    f"  {line}\n"
    "  return config\n"
  )


CONFIGS = {
  "argument": "def get_config(size): return size",
  "dict": "def get_config(): return dict(model={})",
  "exits": "raise SystemExit",
  "imports": "import no_such_module",
  "module": "from configs import digits\nget_config = lambda: type",
  "more": _config("config.train.wandb = True"),
  "nan": _config("config.optimizer.learning_rate = float('nan')"),
  "newline": "raise ValueError('a\\nb')",
  "no_group": _config("config.model = None"),
  "none_field": _config("config.model.width = None"),
  "nul": "\0",
  "raises": _config("1 / 0"),
  "returns_none": "get_config = lambda: None",
  "silent": "class Own(Exception):\n  __str__ = None\nraise Own",
  "syntax": "def get_config(:",
  "text_number": _config("config.model.width = 'wide'"),
  "typo": _config("config.model.widht = 64"),
  "unheard": "class Own(BaseException): pass\nraise Own('why')",
  "untyped_text": _config(
    "with config.ignore_type(): config.train.steps = 'many'"
  ),
}
TINY = """
from helpers import runs
def get_config(): return runs.tiny(**{'train.steps': 2})
"""
HEADER = b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
FILES: dict[str, Content] = {
  # Configs.
  **{f"c/{name}.py": content for name, content in CONFIGS.items()},
  "c/interrupted.json": '{"model"',
  "tiny.py": TINY,
  # What is not regular.
  "dangling.py": _link("nowhere"),
  "fifo": os.mkfifo,
  "hollow": pathlib.Path.mkdir,
  "loop": _link("loop"),
  "with_dangling/dangling": _link("nowhere"),
  "with_fifo/pipe": os.mkfifo,
  # Texts.
  "empty": "",
  "letters": "abc" * 10_000,
  "text": "the quick brown fox.\n" * 1000,
  "tiny": "short",
  "zeros": "abc\0" * 1000,
  # What is not what its name says.
  "cut.gz": b"\x1f\x8b\x08\0\0\0\0\0\0\3KL",
  **{f"text.{suffix}": "text" * 100 for suffix in ("gz", "bz2", "xz", "zip")},
  "bad_info/cifar10_bytes/1.1.0/dataset_info.json": "{",
  "bad_records/cifar10/3.0.2/cifar10-train.array_record-00000-of-00001": "junk",
  # Tokens, pictures, sounds.
  "t/header.bin": np.array([20240520, 1, 4500], "<i4").tobytes() + bytes(9012),
  "t/tokens.bin": bytes(9000),
  "t/wide.bin": np.arange(4500, dtype="<u4").tobytes(),
  "t/wide.npy": _array(np.zeros(4500, np.uint32)),
  "p/flat.npy": _array(np.zeros((9, 192), np.uint8)),
  "p/x.npz": _array(np.zeros((9, 8, 8), np.uint8)),
  "s/scaled.wav": _sound(np.full(9, 32768.0)),
  "s/stereo.wav": _sound(np.zeros((9, 2), np.int16)),
  # Classes.
  **{f"l/good/{x}/{k}": "text" for x in ("no", "yes") for k in range(40)},
  **{f"l/other/{x}/{k}": "text" for x in "ab" for k in range(40)},
  # Exported weights.
  "broken.safetensors": "words",
  "cut.safetensors": bytes([len(HEADER)]) + bytes(7) + HEADER,
  "fifo.safetensors": os.mkfifo,
  "folder.safetensors": pathlib.Path.mkdir,
  "other.safetensors": b"\2" + bytes(7) + b"{}",
  # Released weights.
  "n/cut.npz": _released(cut=400),
  "n/deep.npz": _released(layers=33, width=2),
  "n/fifo.npz": os.mkfifo,
  "n/float16.npz": _released("we", np.float16),
  "n/gap.npz": _released("h1/v_proj/b", layers=3),
  "n/good.npz": _released(),
  "n/lacks.npz": _released("h0/v_proj/b"),
  "n/more.npz": _released(layers=2),
  "n/nan.npz": _released("h0/mlp/b", lambda x: x + np.nan),
  "n/no_start.npz": _released("sos_token/sos"),
  "n/odd.npz": _released("we", lambda x: x[0, 0]),
  "n/pickle.npz": _released("final_norm/g", lambda x: x.astype(object)),
  "n/wide.npz": _released(width=32),
  "n/words.npz": "words",
}
