"""Tests of reading optimized programs."""

import jax
import jax.numpy as jnp
from helpers.errors import refused

from sparse_transformer.targets import hlo


def known(trips):
  return f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'


# Two nested loops, a conditional, a call, a fusion and instructions that launch
# nothing. The inner loop says nothing of its trips, as on TPUs.
LOOPS = f"""HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%a, %b)
}}

%fused (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %exp.2 = f32[8]{{0}} exponential(%p)
}}

%below (x: (s32[], f32[8])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(5)
  %x = (s32[]{{:T(128)}}, f32[8]{{0:T(8,128)S(1)}}) parameter(0)
  %at = s32[] get-tuple-element(%x), index=0
  ROOT %lt = pred[] compare(%at, %limit), direction=LT
}}

%inner (x.1: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %x.1 = (s32[], /*index=1*/f32[8]{{0:T(8,128)S(1)}}) parameter(0)
  %y = f32[8]{{0}} get-tuple-element(%x.1), index=1
  %loop_fusion.7 = f32[8]{{0}} fusion(%y), kind=kLoop, calls=%fused
  %copy.3 = f32[8]{{0}} copy(%loop_fusion.7)
  ROOT %t = (s32[], f32[8]{{0}}) tuple(%at.1, %copy.3)
}}

%outer (x.2: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %x.2 = (s32[], f32[8]{{0}}) parameter(0)
  %dot.4 = f32[8]{{0}} custom-call(%x.2), custom_call_target="__cublas$gemm"
  %while.1 = (s32[], f32[8]{{0}}) while(%x.2), condition=%below, body=%inner
  ROOT %t.1 = (s32[], f32[8]{{0}}) tuple(%at.2, %dot.4)
}}

%short (x.3: f32[8]) -> f32[8] {{
  ROOT %sort.1 = f32[8]{{0}} sort(%x.3), to_apply=%add
}}

%long (x.4: f32[8]) -> f32[8] {{
  %scatter.1 = f32[8]{{0}} scatter(%x.4), to_apply=%add
  ROOT %scatter.2 = f32[8]{{0}} scatter(%scatter.1), to_apply=%add
}}

%command_buffer (x.5: f32[8]) -> f32[8] {{
  ROOT %sort.9 = f32[8]{{0}} sort(%x.5), to_apply=%add
}}

ENTRY %main (x.6: f32[8]) -> f32[8] {{
  %x.6 = f32[8]{{0}} parameter(0)
  %buffer = f32[8]{{0}} custom-call(), custom_call_target="AllocateBuffer"
  %w = (s32[], f32[8]{{0}}) while(%x.6), condition=%c, body=%outer{known(3)}
  %c.1 = f32[8] conditional(%x.6), branch_computations={{%short, %long}}
  ROOT %call = f32[8]{{0}} call(%x.6), to_apply=%command_buffer
}}
"""


def test_launches_times_trips_of_nested_loops():
  profile = hlo.profile(LOOPS)
  assert dict(profile.launches) == dict(
    loop_fusion=15,
    dot=3,
    scatter=2,
    sort=1,
  )
  assert profile.copies == 15
  assert profile.unknown_loops == 0


def test_loop_with_unknown_trips_counts_once_and_is_reported():
  profile = hlo.profile(LOOPS.replace("direction=LT", "direction=NE"))
  assert profile.launches["loop_fusion"] == 3
  assert profile.unknown_loops == 1


COLLECTIVES = """HloModule jit_f

%fused_all-reduce (p: bf16[64]) -> bf16[64] {
  %p = bf16[64]{0} parameter(0)
  ROOT %all-reduce.9 = bf16[64]{0} all-reduce(%p), to_apply=%add
}

%wrapped (q: f32[8,4]) -> f32[4,4] {
  %q = f32[8,4]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = f32[4,4]{1,0} reduce-scatter(%q), dimensions={0}
}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[4]{0} parameter(0)
  %start = (f32[4]{0}, f32[16]{0}) all-gather-start(%x), dimensions={0}
  %done = f32[16]{0} all-gather-done(%start)
  %s = ((bf16[64]{0}), bf16[64]{0}) fusion-start(%y), kind=kCustom, \
calls=%fused_all-reduce
  %d = bf16[64]{0} fusion-done(%s)
  %slice = ((f32[9,4]{1,0}), f32[4]{0}, u32[]) fusion-start(%z), kind=kLoop, \
calls=%sliced
}

ENTRY %main (x: f32[8,4]) -> f32[4,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %all-reduce.2 = (f32[10]{0}, /*index=1*/s32[]) all-reduce(%x, %y), \
to_apply=%add
  %w = (s32[]) while(%x), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"2"}}
  %rs = ((f32[8,4]), f32[4,4]) async-start(%x), calls=%wrapped
  ROOT %r = f32[4,4]{1,0} async-done(%rs)
}
"""


def test_collectives_by_bytes_of_their_results():
  profile = hlo.profile(COLLECTIVES)
  assert profile.collectives == {
    "all-reduce": (1 + 2, 44 + 2 * 128),
    "all-gather": (2, 2 * 64),
    "reduce-scatter": (1, 64),
  }
  # A launch begins where it starts, and a slice is copied.
  assert profile.launches.total() == 1 + 2 * 2 + 1
  assert profile.copies == 2


def test_bytes_of_shapes():
  half = "bf16[2,3]{1,0:T(8,128)(2,1)S(1)}"
  sizes = {
    f"({half}, /*index=1*/f8e4m3fn[4]{{0}})": 16,
    "pred[3,5]{1,0}": 15,
    "s4[6]{0:E(4)}": 3,
    "c64[2]": 16,
    "f32[]": 4,
    "(token[])": 0,
  }

  assert {shape: hlo.num_bytes(shape) for shape in sizes} == sizes


def test_program_of_the_cpu(optimized):
  def f(x):
    def outer(x, _):
      return jax.lax.fori_loop(0, 7, lambda i, x: jnp.sin(x @ x), x), None

    return jax.lax.scan(outer, x, None, length=3)[0]

  shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
  text = jax.jit(f).lower(shape).compile().as_text()
  profile = hlo.profile(text)

  assert not profile.unknown_loops
  # A product and a sine for each of 7 steps of 3; names vary between versions.
  assert list(profile.launches.values()).count(21) >= 2


def test_text_without_entry_is_rejected():
  with refused("no entry computation"):
    hlo.profile("HloModule empty\n")
