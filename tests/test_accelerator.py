"""`make accelerator` runs on CPUs with small sizes, and survives failures."""

import functools
import importlib.machinery
import json
import sys
import types

import jax
import pytest
from helpers import runs

from benchmarks.accelerator import (
  __main__ as accelerator,
  attention,
  child,
  kernels,
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
  parts = "setup", "profile", "attention"
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
  (profile,) = found["profile"]["entries"].values()
  for part in ("products", "dropout", "norm", "outside of layers"):
    assert profile["parts"][part]["ms"] > 0
  assert 0 <= profile["idle"] < 1
  assert "digits" in done.stdout
  assert "streamed" in done.stdout
  assert summary.page([found]) == summary.page([])  # small: not for pages


@pytest.fixture
def faulty(tmp_path, monkeypatch):
  """Runs a part whose module has the given text: (text, alone) -> entries."""
  path = runs.REPO / "benchmarks" / "accelerator" / "faulty_for_a_test.py"
  start = tmp_path / "start.py"
  monkeypatch.setattr(accelerator, "CHILD", (sys.executable, "-P", str(start)))
  monkeypatch.setenv("PYTHONPATH", str(runs.REPO))

  def run(text, *, alone=False):
    path.write_text(text)
    start.write_text(
      "from benchmarks.accelerator import child\n"
      "child.PARTS['faulty'] = child.Part(\n"
      f"  'faulty_for_a_test', 1, alone={alone}\n"
      ")\n"
      "child.main()\n"
    )
    monkeypatch.setitem(PARTS, "faulty", Part("faulty_for_a_test", 1, 120))
    *_, (_, found) = accelerator.run_part("faulty", Settings(seconds=3600))
    return found

  yield run
  path.unlink()


def test_entry_that_raises_dies_or_hangs_does_not_stop_the_others(faulty):
  found = faulty(FAULTY)
  reasons = {name: entry.get("failed", "") for name, entry in found.items()}
  assert reasons == dict(
    good="",
    raises="ValueError: no",
    dies="its process ended with 7",
    hangs="it took too long",
    last="",
  )


# A part whose entries find the flags of their processes.
FLAGS = """
import os

def entries(settings):
  find = lambda: {"found": os.environ["XLA_FLAGS"]}
  return {
    "base": find,
    "base --xla_cpu_enable_fast_math=false": find,
    "base --xla_no_such_flag=1": find,
    "base again": find,
  }
"""


def test_entry_has_its_flags_and_unknown_flags_fail_alone(faulty):
  found = faulty(FLAGS, alone=True)

  base, flag, unknown, again = found.values()
  assert flag["found"].split() == [
    *base["found"].split(),
    "--xla_cpu_enable_fast_math=false",
  ]
  assert "its process ended with" in unknown["failed"]
  assert again["found"] == base["found"]


PROGRAM = """HloModule jit_train_step

%fused (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %d = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %s = f32[8,8] add(%d, %x), metadata={op_name="jit(f)/jvp()/linear/add"}
}

%body (z: f32[8,8]) -> f32[8,8] {
  %z = f32[8,8] parameter(0)
  %gemm_fusion.1 = f32[8,8] fusion(%z), kind=kCustom, calls=%fused
  %call.2 = f32[8,8] custom-call(%z, %z), custom_call_target="__cublas$gemm", \
backend_config={"lhs_contracting_dimensions":["1"]}
  %call.3 = f32[8,8] custom-call(%z), custom_call_target="__cudnn$fmhaSoftmax"
  %add.4 = f32[8,8] add(%z, %z), metadata={op_name="jit(f)/jvp()/dropout/mul"}
  ROOT %sum.5 = f32[8,8] add(%z, %z), metadata={op_name="jit(f)/linear/add"}
}

%condition (z: f32[8,8]) -> pred[] {
  %z = f32[8,8] parameter(0)
  ROOT %less = pred[] constant(false)
}

ENTRY %main (y: f32[8,8]) -> f32[8,8] {
  %y = f32[8,8] parameter(0)
  %layers = f32[8,8] while(%y), condition=%condition, body=%body
  %mul.6 = f32[8,8] multiply(%layers, %y), metadata={op_name="jit(f)/mul"}
  ROOT %copy.7 = f32[8,8] copy(%mul.6)
}
"""
# The kernels of two steps: name, instruction ("": unknown), start, end in us.
KERNELS = (
  ("gemm_fusion_1", "", 0, 4),  # in a CUDA graph, by its name only
  ("nvjet", "call.2", 4, 7),
  ("splitK", "call.2", 7, 8),
  ("fmha", "call.3", 10, 20),
  ("loop_add", "add.4", 12, 14),  # on another stream
  ("loop_add", "sum.5", 20, 21),
  ("loop_mul", "mul.6", 21, 23),
  ("MemcpyD2D", "copy.7", 23, 24),
  ("fmha", "call.3", 30, 40),
)


# JAX's own type of the statistics has none.
@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__")
def test_kernels_of_a_gpu_are_summed_by_part(monkeypatch):
  names = [*dict.fromkeys(name for name, *_ in KERNELS)]
  lines = {"Stream #1(Compute)": "", "Stream #2(Compute)": "", "XLA Ops": ""}
  for name, instruction, start, end in KERNELS:
    event = f"events {{metadata_id: {names.index(name) + 1}"
    event += f" offset_ps: {10**6 * start} duration_ps: {10**6 * (end - start)}"
    if instruction:
      event += f" stats {{metadata_id: 1 str_value: '{instruction}'}}"
    stream = "Stream #2(Compute)" if start == 12 else "Stream #1(Compute)"
    for line in (stream, "XLA Ops"):
      lines[line] += event + "}\n"
  plane = "".join(f"lines {{name: '{x}' {y}}}\n" for x, y in lines.items())
  for i, name in enumerate(names, 1):
    plane += f"event_metadata {{key: {i} value {{id: {i} name: '{name}'}}}}\n"
  plane += "stat_metadata {key: 1 value {id: 1 name: 'hlo_op'}}"
  proto = (
    f"planes {{name: '/device:GPU:0' {plane}}} planes {{name: '/host:CPU'}}"
  )
  data = jax.profiler.ProfileData.from_text_proto(proto)

  monkeypatch.setattr(kernels, "STEPS", 2)
  found = kernels.summarize(data, PROGRAM)
  row = lambda launches, us: dict(launches=launches, ms=pytest.approx(us / 1e3))
  assert {part: x for part, x in found["parts"].items() if x["ms"]} == {
    "products": row(1.5, 4),
    "attention": row(1, 10),
    "dropout": row(0.5, 1),
    "linear": row(0.5, 0.5),
    "outside of layers": row(1, 1.5),
  }
  assert found["idle"] == pytest.approx(8 / 40)
  slowest = found["kernels"][0]
  assert slowest == dict(kernel="fmha", part="attention") | row(1, 10)
  with pytest.raises(kernels.Unsupported, match="no kernels"):
    empty = jax.profiler.ProfileData.from_text_proto(
      "planes {name: '/device:GPU:0'}"
    )
    kernels.summarize(empty, PROGRAM)


def test_variants_are_relative_to_their_base():
  row = dict(step=dict(median=0.5), batch=4, remat="none", peak_bytes=2**30)
  rates = {"": 100, "--xla=1": 125, "again": 99}
  entries = {
    f"digits {change}".strip(): row
    | dict(base="digits", change=change, tokens_per_second=rate)
    for change, rate in rates.items()
  }
  _, *rows = summary.TABLES["variants"](entries.items())
  assert [row[-2:] for row in rows] == [
    ("1.000", ""),
    ("1.250", "--xla=1"),
    ("0.990", "again"),
  ]


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
