"""`make accelerator` runs on CPUs with small sizes, and survives failures."""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import executor_laws as laws
import numpy as np
import pytest

from benchmarks.accelerator import (
  __main__ as accelerator,
  attention,
  child,
  process,
  sanitizer,
  summary,
)
from benchmarks.accelerator.parts import PARTS, RANKS, Part, Settings
from benchmarks.accelerator.process import Results
from sparse_transformer.attention import registry
from sparse_transformer.attention.contract import Case
from sparse_transformer.attention.executors import triton

REPO = pathlib.Path(__file__).parents[1]
DEVICE = dict(name="Fake 9000", number=1, platform="cuda", python="3")
DEVICE |= dict(jax="0", xla_flags="", commit=None)
# A process with entries that end well, raise, end the process, and hang.
FAKE = f"""
import json, os, sys, time
say = lambda **values: print(json.dumps(values), flush=True)
request = json.loads(sys.argv[1])
skip = list(map(tuple, request["skip"]))
say(device={DEVICE!r})
names = "good", "raises", "dies", "hangs", "killed", "last"
entries = [(part, name) for part in request["parts"] for name in names]
say(names=entries)
for entry in entries:
  if entry in skip:
    continue
  name = entry[1]
  say(start=entry)
  if name in ("dies", "hangs", "killed"):
    say(entry=entry, found=dict(partial=1))
    if name == "dies":
      print('{{"entry', end="", flush=True)  # a line that is cut
      os._exit(7)
    os.kill(os.getpid(), 9) if name == "killed" else time.sleep(60)
  failed = dict(failed="ValueError: no") if name == "raises" else {{}}
  say(entry=entry, found=failed, done=True)
"""
# The real process, whose first part has entries before and after its own.
FAULTY = """
import os, time
from benchmarks.accelerator import child

find = child.find
def with_faults(parts, *rest):
  part, found = parts[0], find(parts, *rest)
  faults = {
    "hangs": lambda record: time.sleep(600),
    "dies": lambda record: os._exit(7),
    "killed": lambda record: os.kill(os.getpid(), 9),
  }
  first = {(part, name): run for name, run in faults.items()}
  return first | found
child.find = with_faults
child.main()
"""


def run_fake(tmp_path, monkeypatch, text=FAKE, minutes=1.0, parts=("resume",)):
  """What parts record whose process runs a program."""
  path = tmp_path / "fake.py"
  path.write_text(text)
  monkeypatch.setattr(process, "COMMAND", (sys.executable, str(path)))
  monkeypatch.setattr(process, "IDLE_SECONDS", 5)
  for part in parts:
    quick = dataclasses.replace(PARTS[part], seconds=2)
    monkeypatch.setitem(PARTS, part, quick)
  results = Results(None, tmp_path)
  process.run_parts(parts, Settings(minutes=minutes), results)
  written = json.loads(results.path.read_text())
  assert written == results.content
  return results, {
    part: found["entries"] for part, found in written["parts"].items()
  }


def test_entry_that_raises_dies_or_hangs_does_not_stop_the_others(
  tmp_path, monkeypatch, capsys
):
  results, parts = run_fake(tmp_path, monkeypatch)
  found = parts["resume"]
  assert results.path.name == "accelerator-fake-9000.json"
  assert list(found) == ["good", "raises", "dies", "hangs", "killed", "last"]
  reasons = {name: entry.pop("failed", "") for name, entry in found.items()}
  assert reasons == {
    "good": "",
    "raises": "ValueError: no",
    "dies": "its process ended with status 7",
    "hangs": "it took too long",
    "killed": "its process ended with status -9",
    "last": "",
  }
  for name in ("dies", "hangs", "killed"):
    assert found[name]["partial"] == 1
  assert summary.failures(results.content, PARTS) == 4
  text = summary.text(results.content)
  assert "resume: 2 of 6 passed" in text
  assert "FAILED hangs: it took too long" in text


def test_entries_for_which_there_is_no_time_are_not_failures(
  tmp_path, monkeypatch
):
  """One deadline holds for all parts, those included that never start."""
  text = FAKE.replace('"raises", "dies", ', "")
  parts = "resume", "train"
  results, found = run_fake(tmp_path, monkeypatch, text, 1 / 60, parts)
  time = "the run had 0.0166667 minutes"
  assert found["resume"]["hangs"]["skipped"] == f"stopped: {time}"
  assert found["resume"]["last"] == {"skipped": f"not run: {time}"}
  assert "train" not in found  # what an earlier run found would stay
  assert summary.failures(results.content, parts) == 0


def test_process_that_always_dies_is_not_started_forever(tmp_path, monkeypatch):
  text = FAKE.replace("say(names", "os._exit(3)\nsay(names")
  _, found = run_fake(tmp_path, monkeypatch, text)
  reason = {"failed": "its process ended with status 3"}
  assert found["resume"] == {"start": reason}
  with pytest.raises(ValueError, match="no device that works.* status 3"):
    text = FAKE.replace("say(device", "os._exit(3)\nsay(device")
    run_fake(tmp_path, monkeypatch, text)


def test_device_that_hangs_between_entries_is_left(tmp_path, monkeypatch):
  """Its check, for example; the next entry has a new process."""
  monkeypatch.setattr(process, "IDLE_SECONDS", 1)
  text = FAKE.replace(
    "done=True)", "done=True)\n  time.sleep(30 * (name == 'raises'))"
  )
  _, found = run_fake(tmp_path, monkeypatch, text)
  assert list(found["resume"])[-1] == "last"
  assert found["resume"]["last"].keys() == {"seconds"}


def test_failure_of_one_part_leaves_the_others(monkeypatch):
  monkeypatch.setitem(PARTS, "nothing", Part("nothing.entries"))
  settings = Settings(small=True)
  found = child.find(["setup", "nothing"], range(RANKS), settings)
  *_, (part, name) = found
  assert len(found) > 3 and (part, name) == ("nothing", "start")
  failed = child.attempt(found[part, name], None)["failed"]
  assert failed.startswith("ModuleNotFoundError: ")


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
    ("--out=/proc/x.json", "/proc/x.json"),
    ("--parts=setup,speed", "unknown part 'speed'; known: setup,"),
    ("--minutes=0", "--minutes=0.0 must be positive"),
    ("--parts=setup --out=/dev/null/x.json", "'/dev/null'"),
    ("--out={}/list.json", "holds something else; name another file"),
    (
      "--parts=correctness --executors=fast --out={}/x.json",
      "unknown executor 'fast'; known: ",
    ),
  ],
)
def test_bad_input_is_reported_in_one_line(words, error, tmp_path):
  (tmp_path / "list.json").write_text("[]")
  with pytest.raises(SystemExit) as exit:
    accelerator.main(words.format(tmp_path).split())
  assert re.fullmatch(f"accelerator: .*{re.escape(error)}.*", exit.value.code)


# {what is wrong: (a result, its change, of which call and inputs)}
WRONG = {
  "": ("dv", lambda i, inputs, x: x),
  r"error of dk 0.\d+, above 2e-05$": (
    "dk",
    lambda i, inputs, x: x.at[:, -1].set(0),
  ),
  "error of lse 0.0002, above 0.0001; ": ("lse", lambda i, inputs, x: x + 2e-4),
  "out differ between two runs; out depends on keys outside the pattern": (
    "out",
    lambda i, inputs, x: x * (1 + 1e-6 * i),
  ),
  "out depends on keys outside the pattern$": (
    "out",
    lambda i, inputs, x: x + 1e-8 * inputs[2].sum(),
  ),
  "dv is not zero outside the pattern": ("dv", lambda i, inputs, x: x + 1e-20),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_results_are_found(words):
  from benchmarks.accelerator import correctness

  (*_, mix) = correctness.mixes(True, "float32").values()
  mix, calls = dataclasses.replace(mix, n=100), itertools.count()
  name, change = WRONG[words]

  def run(*inputs):
    found = laws.run(*inputs, mix.heads, "streamed", 0)
    results = dict(zip(laws.NAMES, found, strict=True))
    results[name] = change(next(calls), inputs, results[name])
    return [*results.values()]

  questions = correctness.ask(mix, "float32")
  _, faults = correctness.examine(run, questions)
  assert re.match(words, "; ".join(faults)) and bool(faults) == bool(words)


def test_long_mixes_split_the_lists_of_keys():
  from benchmarks.accelerator import correctness

  mixes = correctness.mixes(False, "bfloat16")
  num_slots = {}
  for title, mix in mixes.items():
    sizes = len(correctness.SCORES), mix.n, len(mix.heads), *mix.widths
    ((plan, _),) = triton.Triton().plans(mix.heads, Case(*sizes, "bfloat16"))
    num_slots[mix.n] = len(plan.tables.by_key.written)
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
  path.unlink()
  monkeypatch.setenv("PATH", str(tmp_path))
  missing = {"skipped": "compute-sanitizer is not installed"}
  assert sanitizer.run("memcheck") == missing


@pytest.mark.soak
@pytest.mark.parametrize(
  "parts", ["setup,correctness,attention", "presets", "train"]
)
def test_command_ends_in_time_whatever_happens(parts, tmp_path, monkeypatch):
  path, out = tmp_path / "faulty.py", tmp_path / "found.json"
  path.write_text(FAULTY)
  monkeypatch.setattr(process, "COMMAND", (sys.executable, str(path)))
  monkeypatch.setenv("PYTHONPATH", str(REPO), prepend=os.pathsep)
  for name, part in PARTS.items():
    quick = dataclasses.replace(part, seconds=min(part.seconds, 60))
    monkeypatch.setitem(PARTS, name, quick)
  start = time.monotonic()
  with pytest.raises(SystemExit, match="entries failed"):
    words = f"--parts={parts}", "--small", "--minutes=5", f"--out={out}"
    accelerator.main(words)
  assert time.monotonic() - start < 5.5 * 60
  found = json.loads(out.read_text())["parts"]
  assert list(found) == parts.split(",")
  for part, content in found.items():
    entries = content["entries"]
    faults = {"hangs", "dies", "killed"} & entries.keys()
    assert len(faults) == 3 or part != parts.split(",")[0]
    for name in faults:
      assert "failed" in entries.pop(name)
    assert entries and not any("failed" in x for x in entries.values())


@pytest.mark.parametrize("part", PARTS)
def test_parts_have_entries_of_full_size(part):
  ranks = [child.entries_of(part, Settings(), rank) for rank in range(RANKS)]
  assert ranks[0]
  for entries in ranks:
    assert all(map(callable, entries.values()))
  if part == "attention":
    for n, (stride, _) in attention.SIZES.items():
      for heads in attention.mixes(stride, small=False).values():
        assert len(heads) == attention.HEADS
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
  accelerator.main(["--small", f"--out={out}"])
  assert str(REPO) not in out.read_text()
  content = json.loads(out.read_text())
  parts = content["parts"]
  assert list(parts) == list(PARTS) and content["device"]["platform"] == "cpu"
  found = parts["correctness"]["entries"].values()
  dtypes = {entry["dtype"] for entry in found}
  assert dtypes == {"float32", "bfloat16", "float16"}
  (trained,) = parts["train"]["entries"].values()
  first, *_, last = (point["bits_per_dim"] for point in trained["curve"])
  assert last < first
  for found in parts["presets"]["entries"].values():
    assert found["tokens_per_second"] > 0 and found["compiled_bytes"] > 0
  for found in parts["attention"]["entries"].values():
    rows = found.get("programs", {}).values()
    ran = [row for row in rows if "skipped" not in row]
    assert all(row["forward_backward"]["tflops"] > 0 for row in ran)
  assert summary.page([content]).startswith("Nothing has been run")
  for found in content["parts"].values():
    found["small"] = False
  text = summary.page([content])
  assert "| 1.00 |" in text and "tokens/s" in text and "validation" in text
  repeated = parts["determinism"]["entries"] | parts["resume"]["entries"]
  assert len(repeated) == 2


def test_most_valuable_entries_come_first():
  with registry.targeting("cuda"):
    found = child.find(["correctness", "attention"], range(RANKS), Settings())
  names = [name for _, name in found]
  late = {"dense", "streamed", "torch flex"}
  slow = [bool(late & {*name.split(", ")}) for name in names]
  assert any(slow) and slow == sorted(slow)
  first = next(name for part, name in found if part == "attention")
  assert first == attention.FIRST[0] and set(attention.FIRST) <= set(names)
  others = [name for name in names if "batched" in name or "float32" in name]
  assert names.index(first) < names.index(others[0])
