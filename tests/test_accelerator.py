"""`make accelerator` runs on CPUs with small sizes, and survives failures."""

import dataclasses
import importlib
import itertools
import json
import pathlib
import re
import subprocess
import sys

import executor_laws as laws
import numpy as np
import pytest

from benchmarks.accelerator import process, sanitizer, summary
from benchmarks.accelerator.parts import PARTS, Settings
from benchmarks.accelerator.results import Results
from sparse_transformer.attention import triton
from sparse_transformer.attention.contract import Case

REPO = pathlib.Path(__file__).parents[1]
DEVICE = {
  "name": "Fake 9000",
  "number": 1,
  "platform": "cuda",
  "python": "3",
  "jax": "0",
  "xla_flags": "",
  "commit": None,
}
# A process with entries that end well, raise, end the process, and hang.
FAKE = f"""
import json, os, sys, time
say = lambda **values: print(json.dumps(values), flush=True)
skip = json.loads(sys.argv[1])["skip"]
say(device={DEVICE!r})
say(names=["good", "raises", "dies", "hangs", "last"])
for name in "good", "raises", "dies", "hangs", "last":
  if name in skip:
    continue
  say(start=name)
  if name in ("dies", "hangs"):
    say(entry=name, found=dict(partial=1))
    os._exit(7) if name == "dies" else time.sleep(60)
  failed = dict(failed="ValueError: no") if name == "raises" else {{}}
  say(entry=name, found=failed, done=True)
"""


def command(*words):
  return subprocess.run(
    [sys.executable, "-m", "benchmarks.accelerator", *words],
    cwd=REPO,
    capture_output=True,
    text=True,
  )


def run_fake(tmp_path, monkeypatch, text=FAKE, minutes=1.0):
  """What a part records whose process runs a program."""
  path = tmp_path / "fake.py"
  path.write_text(text)
  monkeypatch.setattr(process, "COMMAND", (sys.executable, str(path)))
  monkeypatch.setattr(process, "ENTRY_SECONDS", 2)
  results = Results(None, tmp_path)
  process.run_part("correctness", Settings(minutes=minutes), results)
  written = json.loads(results.path.read_text())
  assert written == results.content
  return results, written["parts"]["correctness"]["entries"]


def test_entry_that_raises_dies_or_hangs_does_not_stop_the_others(
  tmp_path, monkeypatch, capsys
):
  results, found = run_fake(tmp_path, monkeypatch)
  assert results.path.name == "accelerator-fake-9000.json"
  assert list(found) == ["good", "raises", "dies", "hangs", "last"]
  reasons = {name: entry.pop("failed", "") for name, entry in found.items()}
  assert reasons == {
    "good": "",
    "raises": "ValueError: no",
    "dies": "its process ended with status 7",
    "hangs": "it took too long",
    "last": "",
  }
  assert found["dies"]["partial"] == found["hangs"]["partial"] == 1
  assert summary.failures(results.content, PARTS) == 3
  text = summary.text(results.content)
  assert "2 of 5 passed" in text
  assert "FAILED hangs: it took too long" in text


def test_entries_for_which_there_is_no_time_are_not_failures(
  tmp_path, monkeypatch
):
  text = FAKE.replace('"raises", "dies", ', "")
  results, found = run_fake(tmp_path, monkeypatch, text, minutes=1 / 60)
  time = "the part had 0.0166667 minutes"
  assert found["hangs"]["skipped"] == f"stopped: {time}"
  assert found["last"] == {"skipped": f"not run: {time}"}
  assert summary.failures(results.content, ["correctness"]) == 0


def test_process_that_always_dies_is_not_started_forever(tmp_path, monkeypatch):
  text = FAKE.replace("say(names", "os._exit(3)\nsay(names")
  _, found = run_fake(tmp_path, monkeypatch, text)
  assert found.keys() == {"start"}
  with pytest.raises(ValueError, match="no device that works.* status 3"):
    text = FAKE.replace("say(device", "os._exit(3)\nsay(device")
    run_fake(tmp_path, monkeypatch, text)


def test_sigterm_ends_the_process_of_the_part(tmp_path):
  out = tmp_path / "found.json"
  words = "-m", "benchmarks.accelerator", "--parts=correctness", f"--out={out}"
  with subprocess.Popen(
    [sys.executable, *words], cwd=REPO, stderr=subprocess.PIPE, text=True
  ) as parent:
    assert parent.stderr.readline().startswith("correctness: ")
    parent.terminate()
    *_, last = parent.stderr  # ends when the process of the part has ended
  assert last == "accelerator: stopped; what was found so far is written\n"
  assert parent.returncode == 1
  assert "correctness" in json.loads(out.read_text())["parts"]


def test_later_run_of_a_part_replaces_it_and_keeps_the_others(tmp_path):
  path = tmp_path / "deep" / "found.json"
  results = Results(path, tmp_path)
  for part in ("setup", "resume"):
    results.start(part, DEVICE, small=False)
    results.record(part, "old", {"failed": "no"})
  results = Results(path, tmp_path)
  results.start("resume", DEVICE, small=True)
  results.record("resume", "new", {})
  parts = json.loads(path.read_text())["parts"]
  assert parts["setup"]["entries"] == {"old": {"failed": "no"}}
  assert parts["resume"]["entries"] == {"new": {}} and parts["resume"]["small"]


@pytest.mark.parametrize(
  "words, error",
  [
    (
      ["--parts=setup,speed"],
      "unknown part 'speed'; known: setup,",
    ),
    (["--minutes=0"], "--minutes=0.0 must be positive"),
    (["--parts=setup", "--out=/dev/null/x.json"], "'/dev/null'"),
    (["--out={}/list.json"], "holds something else; name another file"),
  ],
)
def test_bad_input_is_reported_in_one_line(words, error, tmp_path):
  (tmp_path / "list.json").write_text("[]")
  done = command(*(word.format(tmp_path) for word in words))
  assert done.returncode == 1
  assert len(done.stderr.splitlines()) == 1 and error in done.stderr


def test_small_run_finds_that_executors_are_correct(tmp_path):
  out = tmp_path / "found.json"
  done = command(
    "--parts=setup,correctness", "--executors=dense", f"--out={out}"
  )
  assert done.returncode == 0, done.stderr
  assert "12 of 12 passed" in done.stdout
  text = out.read_text()
  assert str(REPO) not in text
  content = json.loads(text)
  entries = content["parts"]["correctness"]["entries"].values()
  assert {found["dtype"] for found in entries} == {
    "float32",
    "bfloat16",
    "float16",
  }
  assert content["parts"]["correctness"]["small"]
  assert content["device"]["platform"] == "cpu"


def _wrong(change):
  """The faults found in `streamed` with its results changed."""
  from benchmarks.accelerator import correctness

  (*_, mix) = correctness.mixes(True, "float32").values()
  mix = dataclasses.replace(mix, n=100)
  run = lambda *x: laws.run(*x, mix.heads, "streamed", 0)
  questions = correctness.ask(mix, "float32")
  calls = itertools.count()
  return correctness.examine(
    lambda *inputs: change(next(calls), inputs, *run(*inputs)), questions
  )[1]


@pytest.mark.parametrize(
  "change, words",
  [
    (
      lambda i, _, out, lse, dq, dk, dv: (
        out,
        lse,
        dq,
        dk.at[:, -1].set(0),
        dv,
      ),
      r"error of dk 0.\d+, above 2e-05$",
    ),
    (
      lambda i, _, out, lse, *grads: (out, lse + 2e-4, *grads),
      r"error of lse 0.0002, above 0.0001; ",
    ),
    (
      lambda i, _, out, *rest: (out * (1 + 1e-6 * i), *rest),
      r"out differ between two runs; out depends on keys outside the pattern",
    ),
    (
      lambda _, inputs, out, *rest: (out + 1e-8 * inputs[2].sum(), *rest),
      r"out depends on keys outside the pattern$",
    ),
    (
      lambda i, _, *results: (*results[:-1], results[-1] + 1e-20),
      r"dv is not zero outside the pattern",
    ),
  ],
)
def test_wrong_results_are_found(change, words):
  faults = _wrong(change)
  assert re.match(words, "; ".join(faults))


def test_right_results_are_not_faults():
  assert _wrong(lambda i, inputs, *results: results) == []


def test_long_mixes_split_the_lists_of_keys():
  from benchmarks.accelerator import correctness

  mixes = correctness.mixes(False, "bfloat16")
  num_slots = {}
  for title, mix in mixes.items():
    sizes = len(correctness.SCORES), mix.n, len(mix.heads), *mix.widths
    ((plan, _),) = triton.Triton().plans(mix.heads, Case(*sizes, "bfloat16"))
    num_slots[mix.n] = plan.tables.by_key.num_slots
    full = plan.tables.by_key.items[:, 4] - plan.tables.by_key.items[:, 3]
    if title == "full tiles":
      assert full.max() >= 15
  assert num_slots[3072] == 2 and num_slots[12_288] > 3 < num_slots[65_536]


@pytest.mark.parametrize(
  "text, found",
  [
    ("", {}),
    (
      "echo '========= Invalid __global__ read of size 4 bytes'\nexit 9",
      {"failed": "exit status 9: Invalid __global__ read of size 4 bytes"},
    ),
    ("echo wrong; exit 1", {"failed": "exit status 1: wrong"}),
    ("exit 1", {"failed": "exit status 1: no message"}),
    (
      "echo '========= Error: Device not supported.'; exit 1",
      {"skipped": "compute-sanitizer does not support this machine"},
    ),
    ("sleep 9", {"skipped": "it took more than 1 seconds"}),
  ],
)
def test_report_of_the_sanitizer(text, found, tmp_path, monkeypatch):
  path = tmp_path / "compute-sanitizer"
  path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n{text}\n')
  path.chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
  monkeypatch.setattr(sanitizer, "SECONDS", 1)
  assert sanitizer.run("racecheck") == found
  words = (tmp_path / "words").read_text().split()
  assert words[0] == "--tool=racecheck"
  assert words[-3:] == [*sanitizer.COMMAND]


def test_sanitizer_that_is_not_installed_is_skipped(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  found = sanitizer.run("memcheck")
  assert found == {"skipped": "compute-sanitizer is not installed"}


def test_unknown_executor_is_reported_in_one_line(tmp_path):
  done = command(
    "--parts=correctness", "--executors=fast", f"--out={tmp_path / 'x.json'}"
  )
  assert done.returncode == 1
  assert done.stderr.startswith("accelerator: unknown executor 'fast'; known: ")
  assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("part", PARTS)
def test_parts_have_entries_of_full_size(part):
  module = importlib.import_module(f"benchmarks.accelerator.{part}")
  entries = module.entries(Settings())
  assert entries and all(map(callable, entries.values()))
  if part == "attention":
    for n, (stride, _) in module.SIZES.items():
      for heads in module.mixes(stride, small=False).values():
        assert len(heads) == module.HEADS
        for pattern in set(heads):
          pattern.check(n)


def test_images_of_a_file_are_split(tmp_path):
  from benchmarks.accelerator import train, training

  experiment, path = training.load("cifar10_15m"), tmp_path / "images.npy"
  images = np.random.default_rng(0).integers(256, size=(50, 3072))
  np.save(path, images.astype(np.uint8))
  source = train.find(experiment, str(path))
  splits = [source.examples(split) for split in ("train", "validation")]
  found = [row for split in splits for row in split]
  assert [len(split) for split in splits] == [48, 2]
  np.testing.assert_array_equal(found, images)
  np.save(path, images)
  with pytest.raises(ValueError, match="int64 .50, 3072.; images must"):
    train.find(experiment, str(path))


def test_difference_is_that_of_bits():
  from benchmarks.accelerator import training

  state = {"a": np.zeros(3, np.float32), "b": np.ones(2, np.float32)}
  assert training.difference(state, state) == {}
  other = state | {"b": np.array([1, 0.75], np.float32)}
  found = training.difference(state, other)
  assert found == {"failed": "1 of 2 arrays differ, by 0.25"}
  found = training.difference(state, state | {"a": -state["a"]})
  assert found == {"failed": "1 of 2 arrays differ, by 0"}


@pytest.mark.soak
def test_whole_small_run_passes(tmp_path):
  out = tmp_path / "found.json"
  done = command("--small", f"--out={out}")
  assert done.returncode == 0, done.stdout + done.stderr
  parts = json.loads(out.read_text())["parts"]
  assert list(parts) == list(PARTS)
  (trained,) = parts["train"]["entries"].values()
  assert len(trained["curve"]) > 1 and trained["bits_per_dim"] < 4
  for found in parts["presets"]["entries"].values():
    assert found["tokens_per_second"] > 0 and found["compiled_bytes"] > 0
  for found in parts["attention"]["entries"].values():
    rows = found["programs"].values()
    ran = [row for row in rows if "skipped" not in row]
    assert len(ran) > 2
    assert all(row["forward_backward"]["tflops"] > 0 for row in ran)
  repeated = parts["determinism"]["entries"] | parts["resume"]["entries"]
  assert len(repeated) == 2
