"""Tests of training/metrics.py."""

import contextlib
import json
import os
import threading
import time

import pytest

from sparse_transformer.training import metrics


def write(workdir, first, last, value=0.5):
  with metrics.Writer(workdir, step=first, steps=last) as writer:
    for step in range(first + 1, last + 1):
      writer.advance()
      writer.write(step, "train", nats=value, bits_per_dim=step / 10)


def test_each_line_is_an_object_with_step_and_split(tmp_path, capsys):
  write(tmp_path, 0, 3)
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  expected = [
    {"step": step, "split": "train", "nats": 0.5, "bits_per_dim": step / 10}
    for step in (1, 2, 3)
  ]
  assert [json.loads(line) for line in lines] == expected
  assert metrics.read(tmp_path) == expected
  shown = capsys.readouterr().out.splitlines()
  assert shown[0] == "step       1  train       bits 0.1000"
  assert len(shown) == 3


@pytest.mark.parametrize("step", range(5))
def test_resuming_drops_the_lines_of_later_steps(tmp_path, step):
  write(tmp_path, 0, 4, value=1.0)
  write(tmp_path, step, 5, value=2.0)
  lines = metrics.read(tmp_path)
  assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
  assert [line["nats"] for line in lines] == [1.0] * step + [2.0] * (5 - step)


def test_resuming_after_any_cut_of_the_file_gives_complete_lines(tmp_path):
  write(tmp_path, 0, 3)
  path = tmp_path / "metrics.jsonl"
  whole = path.read_text()
  for cut in range(len(whole)):
    path.write_text(whole[:cut])
    metrics._truncate(path, 3)
    assert whole.startswith(path.read_text())
    assert len(metrics.read(tmp_path)) >= whole[:cut].count("\n")


def test_lines_that_are_not_metrics_are_dropped(tmp_path):
  path = tmp_path / "metrics.jsonl"
  good = {"step": 1, "split": "train", "nats": 0.5, "bits_per_dim": 0.7}
  wrong = (
    *(7, [], {}, {"step": None}, {"step": 1, "split": "train"}),
    *(good | {"bits_per_dim": "low"}, good | {"step": True}),
    good | {"tokens_per_second": "fast"},
    *({"step": 1, "split": []}, {"step": 1, "split": "validation"}),
  )
  lines = "".join(json.dumps(line) + "\n" for line in (good, *wrong))
  path.write_text(lines + "[" * 100_000 + '\n\n{"st')
  path.write_bytes(b"\xff\n" + path.read_bytes())
  write(tmp_path, 1, 2)
  assert [line["step"] for line in metrics.read(tmp_path)] == [1, 2]


@pytest.mark.parametrize("on_error", ["stop", "continue"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "events"])
def test_file_that_cannot_be_written_to_ends_a_run_or_not(
  name, on_error, tmp_path, capsys
):
  threads = threading.active_count()
  with contextlib.ExitStack() as stack:
    if on_error == "stop":
      match = f"^metrics could not be written to {tmp_path}: .*No space left"
      stack.enter_context(pytest.raises(OSError, match=match))
    writer = metrics.Writer(tmp_path, step=0, steps=9, on_error=on_error)
    stack.enter_context(writer)
    board = writer._boards["train"]._py_recordio_writer._writer
    file = writer._file if name == "metrics.jsonl" else board
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file.fileno())
    os.close(full)
    writer.write(1, "train", nats=0.5)
  lines = capsys.readouterr().err.splitlines()
  assert threading.active_count() == threads
  if on_error == "continue":
    assert all("continuing without them: metrics" in line for line in lines)
    assert len(lines) >= 1
  else:
    assert not lines


def test_stopwatch_counts_training_only_and_resumes(monkeypatch):
  now = dict(perf_counter=100.0, process_time=7.0)
  for name in now:
    monkeypatch.setattr(time, name, lambda name=name: now[name])

  def wait(seconds):
    now["perf_counter"] += seconds
    now["process_time"] += 1.5 * seconds

  watch = metrics.Stopwatch([dict(seconds=1000.0, processor_seconds=2000.0)])
  watch.count(999)
  wait(5)
  watch.stop()  # it was not running
  watch.restart()
  watch.count(30)
  watch.count(10)
  wait(4)
  watch.stop()
  assert watch.rate() == 10
  assert watch.times() == dict(seconds=1004, processor_seconds=2006)
  wait(50)
  watch.stop()
  watch.restart()  # validation
  watch.count(6)
  wait(1)
  watch.stop()
  wait(50)
  watch.restart()
  watch.count(6)
  wait(1)
  watch.stop()
  assert watch.rate() == 6
  assert watch.times() == dict(seconds=1006, processor_seconds=2009)
  assert watch.rate() == 0
