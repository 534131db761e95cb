"""Compiled kernels and presets for absent devices stay within limits.

Nothing is run. Launches and memory are properties of the compiled program, so
that they can be limited; `make targets-test` runs these tests.
"""

import importlib
import json
import os

import pytest

from sparse_transformer import config as config_lib
from sparse_transformer.attention.contract import Case
from sparse_transformer.attention.executors.hopper_kernels import FEW, MANY
from sparse_transformer.attention.executors.mosaic import MOST_STEPS, Mosaic
from sparse_transformer.patterns import Causal
from sparse_transformer.targets import compilers, hardware

pytestmark = pytest.mark.targets

# Limits, a little above what is reached: of attention, forward and backward by
# itself (each distinct layer), and of whole training steps, batch 16.
# (preset, target, part): (launches, GiB of peak memory on one device, GB moved)
LIMITS = {
  ("enwik8", "h100", "attention"): (6, 2.4, 6.2),
  ("cifar10", "h100", "attention"): (5, 0.15, 0.35),
  # As one device with 2 sequences: they have too few lists of tiles to keep it
  # busy, so that long ones are cut into pieces, each with separate sums.
  ("enwik8", "h100:1x1x8", "attention"): (6, 0.5, 1.2),
  ("enwik8", "v5e", "attention"): (120, 3.6, 22),
  ("cifar10", "v5e", "attention"): (60, 0.26, 1.5),
  ("enwik8", "h100", "step"): (3_200, 11.1, 1_210),
  ("cifar10", "h100", "step"): (11_000, 5.3, 545),
}
# Attention of 4 heads, 4 sequences: widths of a head's queries and values.
WIDTHS = (64, 64), (64, 128), (128, 128)
LENGTHS = 3_072, 12_288
SHARED_LIMIT = 232_448  # bytes of shared memory that a block can have
GPUS = [name for name, x in hardware.KINDS.items() if x.compiler == "cuda"]
FAIL_ON_SPILLS = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"


def compile_for(name, config, part, **options):
  """The report on a config; without a compiler, the test is skipped."""
  target = hardware.parse(name)
  try:
    compilers.python(target.compiler)
  except ValueError as error:
    # make targets-test has installed it, and must not skip its own tests.
    if os.environ.get("REQUIRE_TARGETS"):
      raise
    pytest.skip(str(error))
  report = compilers.compile_for(target, config, part, **options)
  print(json.dumps(report))  # shown if the test fails
  return report


@pytest.mark.parametrize("preset, target, part", LIMITS)
def test_launches_and_memory(preset, target, part):
  config = importlib.import_module(f"configs.{preset}").get_config()
  report = compile_for(target, config, part)
  launches, gib, moved = LIMITS[preset, target, part]
  assert report["programs"]
  for program in report["programs"]:
    assert program["compiles"] and program["fits"]
    assert not program["unknown_loops"]
    assert program["launches"] <= launches
    assert program["memory"]["peak"] <= gib * 2**30
    assert program["moved"] <= moved * 1e9
    assert all(not kernel["spilled_bytes"] for kernel in program["kernels"])
    assert program["kernels"] or program["executor"] != "triton"
    if part == "attention":  # each device has its own sequences
      assert not program["collectives"]


def attention_of(length, qk_width, value_width):
  """A config with merged strided attention of 4 heads of these widths."""
  config = config_lib.get_config()
  config.data.name, config.data.length = "enwik8", length
  config.model.num_layers, config.model.num_heads = 1, 4
  config.model.width = 4 * value_width
  config.model.half_size = qk_width != value_width
  config.model.dtype = "bfloat16"
  config.attention.pattern, config.attention.mode = "strided", "merged"
  config.train.batch_size = 4
  return config


@pytest.mark.parametrize(
  "length, tile, qk_width, value_width",
  [
    *((length, 64, *widths) for length in LENGTHS for widths in WIDTHS),
    (12_288, 128, 64, 64),
    (12_288, 128, 32, 64),
  ],
)
def test_gpu_kernels_spill_no_registers(
  length, tile, qk_width, value_width, monkeypatch
):
  monkeypatch.setenv("XLA_FLAGS", FAIL_ON_SPILLS)
  config = attention_of(length, qk_width, value_width)
  config.attention.tile = tile
  (program,) = compile_for("h100", config, "attention")["programs"]
  assert program["compiles"], program["reason"]
  assert program["executor"] == "triton" and program["launches"] <= 10
  kernels = {kernel["kernel"]: kernel for kernel in program["kernels"]}
  assert {"forward", "backward_of_keys", "backward_of_queries"} <= {*kernels}
  for kernel in kernels.values():
    assert not kernel["spilled_bytes"]
    assert 0 < kernel["registers"] <= 255
    assert 0 < kernel["shared_bytes"] <= SHARED_LIMIT
    assert kernel["copies_in_flight"] > 0  # as products run
  if max(qk_width, value_width) <= 64:  # with two tiles, twice the warps
    threads = "256, 1, 1" if tile == 128 else "128, 1, 1"
    assert kernels["backward_of_keys"]["threads"] == threads


@pytest.mark.parametrize(
  "target, pattern, widths, tile, options",
  [
    ("h100", "strided", (64, 64), 64, {}),
    ("h100", "dense", (64, 64), 128, {}),
    ("h200", "strided", (64, 64), 128, {}),
    ("h200", "dense", (64, 64), 128, dict(segments=True, softcap=30.0)),
    ("h200", "fixed", (64, 64), 128, dict(softcap=30.0, key_heads=2)),
    ("h200", "dense", (64, 128), 64, {}),
    ("h100", "strided", (128, 128), 64, dict(segments=True, softcap=30.0)),
  ],
)
def test_hopper_kernels_spill_no_registers(
  target, pattern, widths, tile, options
):
  config = attention_of(12_288, *widths)
  config.attention.pattern = pattern
  config.attention.backend, config.attention.tile = "hopper", tile
  (program,) = compile_for(target, config, "attention", **options)["programs"]
  assert program["compiles"], program["reason"]
  names = [kernel["kernel"] for kernel in program["kernels"]]
  assert names == ["backward_of_keys", "backward_of_queries", "forward"]
  for kernel in program["kernels"]:
    assert not kernel["spilled_bytes"]
    if tile == 128:
      # As many at launch as two consumers and a producer have later, or the
      # consumers would wait for more for ever.
      assert 3 * kernel["registers"] == 2 * MANY + FEW
    assert 0 < kernel["registers"] <= 255
    assert 0 < kernel["shared_bytes"] <= SHARED_LIMIT


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("qk_width, value_width", WIDTHS)
def test_tpu_programs_fit(length, qk_width, value_width):
  """The compiler rejects kernels that need more than a core's VMEM."""
  config = attention_of(length, qk_width, value_width)
  (program,) = compile_for("v5e", config, "attention")["programs"]
  assert program["compiles"] and program["fits"], program.get("reason")
  assert program["executor"] == "mosaic"


@pytest.mark.parametrize("target, batch", [("v5e", 1), ("v5p", 4)])
def test_longest_tables_fit_in_scalar_memory(target, batch):
  config = attention_of(65_024, 64, 64)
  config.model.num_heads, config.model.width = 8, 512
  config.train.batch_size, config.attention.pattern = batch, "dense"
  case = Case(1, 65_024, 8, 64, 64, "bfloat16", "tpu")
  ((plan, _),) = Mosaic().plans((Causal(),) * 8, case)
  for launch in (plan.tables.by_query, plan.tables.by_key):
    assert 65_000 < len(launch.steps[0].items) <= MOST_STEPS
  (program,) = compile_for(target, config, "attention")["programs"]
  assert program["compiles"] and program["fits"], program.get("reason")


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize(
  "target, tile", [("h100", 64), ("h100", 128), ("v5e", 0)]
)
def test_key_heads_segments_and_soft_cap(target, tile, segments, softcap):
  """They add no launch of kernels, and no registers are spilled."""
  config = attention_of(3_072, 64, 64)
  config.attention.tile = tile
  config.model.num_heads, config.model.width = 8, 512
  plain = compile_for(target, config, "attention")["programs"][0]
  options = dict(segments=segments, softcap=softcap)
  (program,) = compile_for(target, config, "attention", key_heads=2, **options)[
    "programs"
  ]
  assert program["compiles"] and program["fits"], program.get("reason")
  assert program["executor"] == plain["executor"]
  assert len(program["kernels"]) == len(plain["kernels"])
  assert all(not kernel["spilled_bytes"] for kernel in program["kernels"])
  assert program["memory"]["peak"] < 0.8 * plain["memory"]["peak"]
  if target == "h100":
    assert all(kernel["copies_in_flight"] for kernel in program["kernels"])
    launched = [x["most_launched"]["pallas_call"] for x in (program, plain)]
    assert launched[0] == launched[1]


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize(
  "widths", [(32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
)
def test_gpu_kernels_fit_in_shared_memory(target, widths):
  config = attention_of(3_072, *widths)
  (program,) = compile_for(target, config, "attention")["programs"]
  assert program["compiles"], program["reason"]
  assert program["executor"].startswith(("triton", "batched; not triton:"))


@pytest.mark.parametrize("target", ["h200", "a100", "v5p", "v6e"])
def test_other_targets_compile(target):
  report = compile_for(target, attention_of(3_072, 64, 64), "attention")
  (program,) = report["programs"]
  assert program["compiles"] and program["fits"], program.get("reason")
  assert report["memory"] == hardware.parse(target).memory


def test_program_that_cannot_fit_is_told():
  config = attention_of(3_072, 64, 64)
  config.train.batch_size = 4_096
  (program,) = compile_for("v5e", config, "attention")["programs"]
  assert program["fits"] is False and program["needed"] > 16 * 2**30


def test_topology_that_the_compiler_rejects():
  config = attention_of(3_072, 64, 64)
  config.train.batch_size = 15
  with pytest.raises(ValueError, match="rejects target 'v5e:3x5'"):
    compile_for("v5e:3x5", config, "attention")
