"""`make accelerator` runs on CPUs with small sizes, and survives failures."""

import functools
import importlib.machinery
import json
import sys
import types

import pytest
from helpers import runs

from benchmarks.accelerator import (
  __main__ as accelerator,
  attention,
  child,
  summary,
)
from benchmarks.accelerator.child import PARTS, Part, Settings

pytestmark = pytest.mark.tools
command = functools.partial(runs.python, "-m", "benchmarks.accelerator")

# A part whose entries end well, raise, end the process, and hang.
FAULTY = """
import os, time

def fail():
  raise ValueError("no")

def entries(settings):
  return {
    "good": lambda: {"found": 1},
    "raises": fail,
    "dies": lambda: os._exit(7),
    "hangs": lambda: time.sleep(1200),
    "last": lambda: {"found": 2},
  }
"""


def test_parts_run_and_write_their_results(tmp_path):
  out = tmp_path / "found.json"
  parts = "setup", "attention", "presets"
  words = "--small", f"--parts={','.join(parts)}", "--backends=streamed"
  # More devices than sequences in the batch of the preset.
  done = command(*words, f"--out={out}", **runs.environment(8))

  assert done.returncode == 0, done.stderr
  found = json.loads(out.read_text())
  assert [*found] == [*parts]
  for part in found.values():
    assert part["entries"]
    assert part["device"]["small"]
    assert not any("failed" in x for x in part["entries"].values())
  assert "digits" in done.stdout
  assert "streamed" in done.stdout
  assert summary.page([found]) == summary.page([])  # small: not for pages


def test_entry_that_raises_dies_or_hangs_does_not_stop_the_others(
  tmp_path, monkeypatch
):
  folder = runs.REPO / "benchmarks" / "accelerator"
  path = folder / "faulty_for_a_test.py"
  path.write_text(FAULTY)
  start = tmp_path / "start.py"
  start.write_text(
    "from benchmarks.accelerator import child\n"
    "child.PARTS['faulty'] = child.Part('faulty_for_a_test', 1)\n"
    "child.main()\n"
  )
  monkeypatch.setitem(PARTS, "faulty", Part("faulty_for_a_test", 1, 120))
  monkeypatch.setattr(accelerator, "CHILD", (sys.executable, "-P", str(start)))
  monkeypatch.setenv("PYTHONPATH", str(runs.REPO))
  try:
    *_, (_, found) = accelerator.run_part("faulty", Settings(seconds=3600))
  finally:
    path.unlink()

  reasons = {name: entry.get("failed", "") for name, entry in found.items()}
  assert reasons == dict(
    good="",
    raises="ValueError: no",
    dies="its process ended with 7",
    hangs="it took too long",
    last="",
  )


# Ends when the first entry is in the file; another process does nothing.
WRITTEN = """
import json, os, pathlib, sys, time
from multiprocessing.connection import Connection

say = Connection(int(sys.argv[1]), readable=False).send
device = dict(name="", small=True, number=1, python="", commit="")
say(dict(device=device | {"packages": {"jax": ""}}, names=["a", "b", "c"]))
if json.loads(sys.argv[2])[2]:
  sys.exit(3)
say({"start": "a"})
say({"entry": "a", "found": {"value": 17}})
say({"start": "b"})
print("noise", flush=True)
out = pathlib.Path(__file__).with_name("x.json")
while not out.exists() or "17" not in out.read_text():
  time.sleep(0.01)
"""
LATE = {"skipped": "its part had no time left"}


@pytest.mark.parametrize(
  "end, minutes, b, c",
  [
    ("time.sleep(1200)", 0.5, LATE, LATE),
    (
      "os.kill(os.getpid(), 11)",
      1,
      {"failed": "its process ended with -11"},
      {"skipped": "before any entry, its process ended with 3"},
    ),
  ],
)
def test_results_are_written_as_they_come(
  end, minutes, b, c, tmp_path, monkeypatch
):
  start = tmp_path / "start.py"
  out = tmp_path / "x.json"
  start.write_text(WRITTEN + end)
  monkeypatch.setattr(accelerator, "CHILD", (sys.executable, str(start)))
  words = "--parts=setup", f"--minutes={minutes}", f"--out={out}"

  assert accelerator.run(accelerator.parse(words)) == ("failed" in b)
  found = json.loads(out.read_text())["setup"]["entries"]
  assert found == {
    "a": {"value": 17},
    "b": b,
    "c": c,
  }


@pytest.mark.parametrize(
  "words, line",
  [
    (["--parts=speed"], "unknown part 'speed'"),
    (["--minutes=0"], "must be positive"),
    (["--parts=attention", "--backends=fast"], "unknown backend 'fast'"),
  ],
)
def test_bad_settings_are_one_line(words, line, tmp_path):
  done = command(*words, f"--out={tmp_path}/x.json")
  assert done.returncode == 1
  (found,) = done.stderr.splitlines()
  assert found.startswith("accelerator: ")
  assert line in found


@pytest.mark.parametrize(
  "words, kind",
  [
    ("Out of memory", "skipped"),
    ("Shared memory size limit", "failed"),
  ],
)
def test_lack_of_memory_is_no_failure_but_for_kernels(words, kind):
  def run():
    raise RuntimeError(f"RESOURCE_EXHAUSTED: {words}")

  assert words in child.attempt(run)[kind]


def test_flash_attention_is_an_entry_where_it_is_installed(monkeypatch):
  module = types.ModuleType("fa4_jax")
  module.__spec__ = importlib.machinery.ModuleSpec("fa4_jax", None)
  dense = attention.program(attention.RIVAL, attention.patterns.Causal())

  def flash_attn(q, k, v, *, causal):
    return dense(q, k, v)

  module.flash_attn = flash_attn
  monkeypatch.setitem(sys.modules, "fa4_jax", module)
  small = Settings(small=True, backends=("streamed",))

  def on(platform):
    monkeypatch.setattr(
      attention.platforms, "current_platform", lambda: platform
    )

  assert not [x for x in attention.entries(small) if attention.FLASH in x]
  on("cuda")
  *_, (name, measure) = attention.entries(small).items()
  assert attention.FLASH in name
  on("cpu")
  assert "forward_backward" in measure()["programs"][attention.FLASH]
