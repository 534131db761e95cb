"""Tests of training/metrics.py."""

import io
import json
import os
import sys

import pytest
from tensorboard.backend.event_processing import event_accumulator

from sparse_transformer.progress import progress, say
from sparse_transformer.training import metrics, stopwatch


def write(workdir, first, last, value=0.5):
  with metrics.Writer(workdir, step=first) as writer:
    for step in range(first + 1, last + 1):
      writer.write(
        step,
        "train",
        nats=value,
        bits_per_dim=step / 10,
      )


def steps_of(workdir):
  return [line["step"] for line in metrics.read(workdir)]


@pytest.mark.parametrize("step", [0, 2, 4])
def test_resuming_drops_what_is_of_later_steps(tmp_path, step):
  write(tmp_path, 0, 4, value=1.0)
  write(tmp_path, step, 5, value=2.0)
  shown = board(tmp_path / "events" / "train").Scalars("nats")
  steps = [1, 2, 3, 4, 5]
  nats = [1.0] * step + [2.0] * (5 - step)
  assert steps_of(tmp_path) == steps
  assert [line["nats"] for line in metrics.read(tmp_path)] == nats
  assert [x.step for x in shown] == steps
  assert [x.value for x in shown] == nats


def test_resuming_after_any_cut_of_the_file_gives_complete_lines(tmp_path):
  write(tmp_path, 0, 3)
  path = tmp_path / "metrics.jsonl"
  whole = path.read_text()
  for cut in range(0, len(whole), 3):
    path.write_text(whole[:cut])
    metrics._truncate(path, 3)
    assert whole.startswith(path.read_text())
    assert len(metrics.read(tmp_path)) >= whole[:cut].count("\n")


def test_lines_that_are_not_metrics_are_dropped(tmp_path):
  good = {
    "step": 1,
    "split": "train",
    "nats": 0.5,
    "bits_per_dim": 0.7,
  }
  lines = [
    good,
    7,
    [],
    {},
    {"step": None},
    {"step": 1, "split": "train"},
    good | {"bits_per_dim": "low"},
    {"step": 1, "split": []},
    good | {"seconds": "few"},
    good | {"accuracy": None},
  ]
  text = "\n".join(map(json.dumps, lines))
  nested = "[" * 100_000
  content = f'{text}\n{nested}\n\n{{"st'
  (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n" + content.encode())
  write(tmp_path, 1, 2)
  assert steps_of(tmp_path) == [1, 2]


def test_file_that_cannot_be_written_to_ends_a_run(tmp_path):
  with pytest.raises(OSError, match=r"No space left .*metrics.jsonl"):
    with metrics.Writer(tmp_path, step=0) as writer:
      full = os.open("/dev/full", os.O_WRONLY)
      os.dup2(full, writer._file.fileno())
      os.close(full)
      writer.write(1, "train", nats=0.5)


def test_closed_pipe_does_not_end_a_run(tmp_path, monkeypatch):
  reader, writer = os.pipe()
  os.close(reader)
  with os.fdopen(writer, "w") as stdout:
    monkeypatch.setattr(sys, "stdout", stdout)
    write(tmp_path, 0, 3)
  assert steps_of(tmp_path) == [1, 2, 3]


def board(folder):
  """What TensorBoard reads in a folder."""
  return event_accumulator.EventAccumulator(str(folder)).Reload()


def test_tensorboard_has_one_tag_for_all_splits(tmp_path):
  with metrics.Writer(tmp_path, step=0) as writer:
    writer.write(
      3,
      "train",
      bits_per_dim=0.5,
      spans=[[1, 2], [3, 4]],
    )
    writer.write(3, "validation", bits_per_dim=0.25)

  train, validation = (
    board(tmp_path / "events" / split) for split in ("train", "validation")
  )
  for found, bits in (
    (train, 0.5),
    (validation, 0.25),
  ):
    (event,) = found.Scalars("bits_per_dim")
    assert event.step == 3
    assert event.value == bits

  assert [x.value for x in train.Scalars("spans/1/0")] == [3]


def test_line_begins_with_bits_and_has_single_numbers():
  values = dict(
    nats=0.1,
    router_z=1e-9,
    bits_per_dim=12.34567,
    seconds=7.0,
    spans=[[1], [2]],
    tokens_per_second=123456.789,
  )
  assert metrics.as_line(9, "train", values) == (
    "step       9  train       bits 12.3457  tok/s   123,457"
    "  router_z 1.0000e-09"
  )

  widths = set()
  for bits, rate in ((3.5, 0.001), (12.34567, 1.2345e-5), (2, 0)):
    values = dict(
      bits_per_dim=bits,
      learning_rate=rate,
    )
    widths.add(len(metrics.as_line(9, "train", values)))
  assert len(widths) == 1  # columns line up


class Terminal(io.StringIO):
  """Both streams of a process, on a terminal."""

  def isatty(self):
    return True


def test_progress_bar_leaves_lines_whole(tmp_path, monkeypatch):
  terminal = Terminal()
  monkeypatch.setattr(sys, "stdout", terminal)
  monkeypatch.setattr(sys, "stderr", terminal)

  def fail(*_):
    return 1 / 0

  with (
    metrics.Writer(
      tmp_path,
      step=0,
      on_metrics=fail,
    ) as writer,
    progress("step", 9) as advance,
  ):
    say("compiling")
    advance(1)
    writer.write(1, "train", bits_per_dim=0.5)

  # A carriage return goes back over what was written before it.
  seen = [x.rpartition("\r")[2] for x in terminal.getvalue().split("\n")]

  assert [x for x in seen if x.strip() and "it/s" not in x] == [
    "compiling",
    "on_metrics at step 1 failed: ZeroDivisionError: division by zero",
    "step       1  train       bits  0.5000",
  ]
  assert "it/s" in terminal.getvalue()


def test_function_gets_each_line_and_its_errors_end_nothing(
  tmp_path, capsys, monkeypatch
):
  got = []
  errors = {
    2: KeyError("run"),
    3: SystemExit(0),
    4: GeneratorExit,
  }

  def on_metrics(step, split, values):
    about = dict(step=step, split=split)
    got.append(about | values)
    if step in errors:
      raise errors[step]

  given = dict(
    step=0,
    on_metrics=on_metrics,
  )
  values = dict(
    nats=0.5,
    bits_per_dim=0.7,
  )
  with metrics.Writer(tmp_path, **given) as writer:
    writer.write(1, "network", parameters=5)
    for step in (1, 2, 3, 4):
      writer.write(step, "train", **values)

  assert got == metrics.read(tmp_path)
  assert len(got) == 5
  assert capsys.readouterr().err == (
    "on_metrics at step 2 failed: KeyError: 'run'\n"
    "on_metrics at step 3 failed: SystemExit: 0\n"
    "on_metrics at step 4 failed: GeneratorExit\n"
  )

  monkeypatch.setattr(metrics.processes, "is_first", lambda: False)
  with metrics.Writer(tmp_path, **given) as writer:
    writer.write(5, "train", **values)
  metrics.processes.say("another process says this")
  assert len(got) == 5
  assert "another" not in capsys.readouterr().out


def test_stopwatch_counts_training_only_and_resumes(monkeypatch):
  now = dict(
    seconds=100.0,
    processor_seconds=7.0,
  )
  clocks = {name: lambda name=name: now[name] for name in now}
  monkeypatch.setattr(stopwatch, "TIMES", clocks)

  def wait(seconds):
    now["seconds"] += seconds
    now["processor_seconds"] += 1.5 * seconds

  lines = [dict(seconds=1000.0, processor_seconds=2000.0), dict(step=1)]
  watch = stopwatch.Stopwatch(lines, ("processor_seconds", 2012))
  watch.count(30)
  watch.count(10)
  wait(4)

  assert watch.share() == 2006 / 2012
  with watch.paused():
    wait(50)
    assert watch.rate() == 10
    assert watch.times() == dict(
      seconds=1004,
      processor_seconds=2006,
    )

  watch.count(6)
  wait(1)

  with pytest.raises(KeyError), watch.paused():  # as of a signal
    wait(50)
    raise KeyError

  watch.count(6)
  wait(1)

  assert not watch.is_over()
  with watch.paused():
    assert watch.rate() == 6
    assert watch.times() == dict(
      seconds=1006,
      processor_seconds=2009,
    )
    assert watch.rate() == 0

  wait(9)

  assert watch.is_over()
  assert watch.share() == 1
  assert stopwatch.Stopwatch().share() is None
