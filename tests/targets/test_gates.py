"""Compiled kernels and presets for absent devices stay within limits.

Nothing is run. Launches and memory are properties of the compiled program, so
that they can be limited; `make targets-test` runs these tests.
"""

import json
import os

import pytest
from helpers import assembly, backend_laws as laws
from helpers.errors import refused

from benchmarks import compiled, record, traffic
from sparse_transformer import config as config_lib
from sparse_transformer.attention.backends.mosaic import Mosaic
from sparse_transformer.patterns import Causal
from sparse_transformer.targets import compilers, hardware

pytestmark = pytest.mark.targets

# Limits, a little above what is reached: of attention, forward and backward by
# itself (each distinct layer), and of whole training steps, batch 16.
# (preset, with changes; target; part): (launches, GiB of peak memory on one
# device)
LIMITS = {
  ("enwik8", "h100", "attention"): (6, 2.4),
  ("cifar10", "h100", "attention"): (10, 0.29),
  ("enwik8", "h100:1x1x8", "attention"): (6, 0.5),
  ("enwik8", "v5e", "attention"): (120, 3.6),
  ("cifar10", "v5e", "attention"): (60, 0.26),
  # The least memory, for GPUs on which nothing else fits.
  ("enwik8 model.remat=block", "h100", "step"): (3_250, 11.1),
  ("cifar10 model.remat=block", "h100", "step"): (11_300, 5.3),
}
# Attention of 4 heads, 4 sequences: widths of a head's queries and values.
WIDTHS = (
  (64, 64),
  (64, 128),
  (128, 128),
)
LENGTHS = 3_072, 12_288
GPUS = "a100", "a10", "rtx4090", "h100", "b200", "rtxpro6000"
FAIL_ON_SPILLS = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"


def need(compiler):
  """Skips a test if a compiler is not installed."""
  try:
    compilers.python(compiler)
  except ValueError as error:
    # make targets-test has installed it, and must not skip its own tests.
    if os.environ.get("REQUIRE_TARGETS"):
      raise
    pytest.skip(str(error))


@pytest.fixture
def compile_for(tmp_path, monkeypatch):
  """compile_for(target, config, part, *flags, **options): (programs, kernels).

  Without a compiler, the test is skipped.
  """
  calls = []

  def compile_program(name, config, part="attention", *flags, **options):
    target = hardware.parse(name)
    need(target.compiler)
    folder = tmp_path / str(len(calls))
    calls.append(name)
    for key, value in assembly.variables(folder, *flags).items():
      if target.compiler == "cuda":
        monkeypatch.setenv(key, str(value))
    report = compilers.compile_for(target, config, part, **options)
    kernels = assembly.kernels(folder)
    print(json.dumps([report, kernels]))  # shown if the test fails
    return report["programs"], kernels

  return compile_program


def attention_of(length, qk_width, value_width, pattern="strided", **fields):
  """A config with attention of 4 heads of these widths, factors merged."""
  config = config_lib.get_config()
  config.data.name = "enwik8"
  config.data.length = length
  config.model.num_layers = 1
  config.model.num_heads = 4
  config.model.width = 4 * value_width
  config.model.half_size = qk_width != value_width
  config.model.dtype = "bfloat16"
  config.attention.pattern = pattern
  config.attention.mode = "merged"
  config.attention.update(fields)
  config.train.batch_size = 4
  return config


def is_within_a_gpu(kernel, name):
  shared = int(hardware.GPUS[name]["shared"])
  fits = 0 < kernel["registers"] <= 255 and not kernel["spilled_bytes"]
  return fits and 0 < kernel["shared_bytes"] <= shared


@pytest.mark.parametrize("preset, target, part", LIMITS)
def test_launches_and_memory(preset, target, part, compile_for):
  config = compiled.config_of(preset)
  programs, kernels = compile_for(target, config, part)
  launches, gib = LIMITS[preset, target, part]

  assert programs
  assert all(not x["spilled_bytes"] for x in kernels.values())

  for program in programs:
    assert program["compiles"]
    assert program["fits"]
    assert not program["unknown_loops"]
    assert program["launches"] <= launches
    assert program["memory"]["peak"] <= gib * 2**30
    assert kernels or not program["backend"].startswith("triton")
    if part == "attention":  # each device has its own sequences
      assert not program["collectives"]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_gpu_kernels_spill_no_registers(length, widths, compile_for):
  config = attention_of(length, *widths)
  (program,), kernels = compile_for("h100", config, "attention", FAIL_ON_SPILLS)
  assert program["compiles"], program["reason"]
  assert program["launches"] <= 10
  assert {"forward", "backward_of_keys", "backward_of_queries"} <= {*kernels}
  for kernel in kernels.values():
    assert is_within_a_gpu(kernel, "h100")
    assert kernel["copies_in_flight"] > 0  # as products run


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize(
  "widths",
  [
    (32, 32),
    (32, 64),
    *WIDTHS,
  ],
)
def test_kernels_of_every_gpu_spill_no_registers(target, widths, compile_for):
  config = attention_of(3_072, *widths)
  (program,), kernels = compile_for(target, config)
  assert program["compiles"], program["reason"]
  assert program["backend"].startswith("triton; not cudnn:")
  assert kernels
  assert all(is_within_a_gpu(x, target) for x in kernels.values()), kernels


@pytest.mark.parametrize("preset", traffic.PRESETS)
def test_steps_cost_no_more_than_their_records(preset):
  need("cuda")
  (old,) = (x for x in record.read("traffic") if x["preset"] == preset)
  assert not list(traffic.growth(traffic.measure(preset), old))


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("width", [192, 1024])
def test_kernels_of_norms_spill_no_registers(target, width, compile_for):
  config = attention_of(3_072, 64, 64)
  config.model.num_heads = width // 64
  config.model.width = width
  config.model.dropout = 0.4
  config.model.remat = "none"
  (program,), kernels = compile_for(target, config, "step")
  assert program["compiles"], program["reason"]
  assert {"norm_forward", "norm_backward"} <= {*kernels}
  for name, kernel in kernels.items():
    if name.startswith("norm"):  # they may need no shared memory
      assert 0 < kernel["registers"] <= 255
      assert not kernel["spilled_bytes"]


@pytest.mark.parametrize("target", GPUS)
def test_dense_patterns_call_cudnn(target, compile_for):
  """JAX lowers its calls without a device; cuDNN itself is not asked."""
  config = attention_of(3_071, 32, 64, "dense")
  (program,), kernels = compile_for(target, config)
  assert program["compiles"]
  assert program["backend"] == "cudnn"
  assert not kernels
  assert program["launches"] <= 25
  assert any("dot_product" in x for x in program["most_launched"])


@pytest.mark.parametrize("target", ["v5e", "v5p", "v6e"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_tpu_programs_fit(target, length, widths, compile_for):
  """The compiler rejects kernels that need more than a core's VMEM."""
  if target != "v5e" and (length, widths) != (LENGTHS[0], WIDTHS[0]):
    pytest.skip("the programs of v5e are the largest for its memory")
  (program,), _ = compile_for(target, attention_of(length, *widths))
  assert program["compiles"] and program["fits"], program.get("reason")
  assert program["backend"] == "mosaic"


@pytest.mark.parametrize(
  "target, batch",
  [
    ("v5e", 1),
    ("v5p", 4),
  ],
)
def test_longest_tables_fit_in_scalar_memory(target, batch, compile_for):
  config = attention_of(65_024, 64, 64, "dense")
  config.model.num_heads = 8
  config.model.width = 512
  config.train.batch_size = batch
  request = laws.request_for((Causal(),) * 8, 65_024)
  ((plan, _),) = Mosaic().plans(request)

  for steps in (plan.tables.by_query[0], plan.tables.by_key[0]):
    assert 65_000 < len(steps.rows) <= Mosaic.MOST_STEPS
  (program,), _ = compile_for(target, config)
  assert program["compiles"] and program["fits"], program.get("reason")


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("target", ["h100", "a100", "rtxpro6000", "v5e"])
def test_key_heads_segments_and_soft_cap(
  target, segments, softcap, compile_for
):
  """They add no launch of kernels, and no registers are spilled."""
  config = attention_of(3_072, 64, 64)
  config.model.num_heads = 8
  config.model.width = 512
  (plain,), plain_kernels = compile_for(target, config)
  options = dict(
    segments=segments,
    softcap=softcap,
    key_heads=2,
  )
  (program,), kernels = compile_for(target, config, "attention", **options)

  assert program["compiles"] and program["fits"], program.get("reason")
  assert program["backend"].split(";")[0] == plain["backend"].split(";")[0]
  assert kernels.keys() == plain_kernels.keys()
  assert program["memory"]["peak"] < 0.8 * plain["memory"]["peak"]

  if target != "v5e":
    assert all(is_within_a_gpu(kernel, target) for kernel in kernels.values())
    assert all(kernel["copies_in_flight"] for kernel in kernels.values())


def test_program_that_cannot_fit_is_told(compile_for):
  config = attention_of(3_072, 64, 64)
  config.train.batch_size = 4_096
  (program,), _ = compile_for("v5e", config)
  assert program["fits"] is False
  assert "hbm" in program["reason"].lower()


def test_topology_that_the_compiler_rejects(compile_for):
  config = attention_of(3_072, 64, 64)
  config.train.batch_size = 15
  with refused("rejects target 'v5e:3x5'"):
    compile_for("v5e:3x5", config)
