"""Folders of runs."""

import pathlib

from bad_inputs.cases import (
  DIGITS,
  EVAL,
  HUGE,
  LONG,
  REPORT,
  SAMPLE,
  TRAIN,
  Bad,
  on_run,
  train,
)
from bad_inputs.files import (
  bind,
  copy,
  cut,
  deleted,
  fifo,
  file,
  folder,
  link,
  made,
  replaced,
  setting,
  several,
)


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
