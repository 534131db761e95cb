"""`make accelerator` runs on CPUs with small sizes, and survives failures."""

import importlib
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.accelerator import process, summary
from benchmarks.accelerator.parts import PARTS, Settings
from benchmarks.accelerator.results import Results

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
  assert "9 of 9 passed" in done.stdout
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


def test_wrong_executor_is_found(monkeypatch):
  from benchmarks.accelerator import correctness
  from sparse_transformer.attention import registry, streamed

  class Wrong:
    """Forgets the key gradients of the last tile."""

    unsupported = staticmethod(streamed.unsupported)
    tile_size, plans = streamed.tile_size, staticmethod(streamed.plans)
    tile_size = staticmethod(streamed.tile_size)
    forward = staticmethod(streamed.forward)

    @staticmethod
    def backward(*arguments):
      dq, dk, dv = streamed.backward(*arguments)
      return dq, dk.at[:, -1].set(0), dv

  monkeypatch.setitem(registry.EXECUTORS, "wrong", Wrong())
  ((_, heads), *_) = correctness.mixes(small=True)
  case = heads[:1], 33, (16, 32), "float32"
  found = correctness.check("wrong", *case)
  assert found["failed"].startswith("relative errors above 2e-05: dk ")
  assert "failed" not in correctness.check("streamed", *case)


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
  assert len(repeated) > 4
