"""Tests of the count of what a compiled step moves."""

import pytest

from benchmarks import traffic


def scope(name):
  """What the compiler says of where in the network an instruction is from."""
  return f'metadata={{op_name="jit(train_step)/while/body/{name}"}}'


# One product outside of layers; in three trips of a loop: a kernel of
# attention, a fusion that reads one layer of a stack, and one that writes into
# a stack of what is kept.
TEXT = f"""HloModule jit_train_step

%take (stack: f32[3,8,16], i: s32[]) -> f32[8,16] {{
  %stack = f32[3,8,16] parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,8,16] dynamic-slice(%stack, %i, %i, %i)
  ROOT %flat = f32[8,16] bitcast(%row)
}}

%put (kept: f32[3,8,16], row: f32[1,8,16], i: s32[]) -> f32[3,8,16] {{
  %kept = f32[3,8,16] parameter(0)
  %row = f32[1,8,16] parameter(1)
  %i = s32[] parameter(2)
  ROOT %new = f32[3,8,16] dynamic-update-slice(%kept, %row, %i, %i, %i)
}}

%body (state: (s32[], f32[8,16], f32[3,8,16])) -> (s32[]) {{
  %state = (s32[], f32[8,16], f32[3,8,16]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,16] get-tuple-element(%state), index=1
  %kept = f32[3,8,16] get-tuple-element(%state), index=2
  %row = f32[8,16] fusion(%kept, %i), calls=%take, {scope("dropout/mul")}
  %pallas_call.1 = f32[8,16] custom-call(%x), {scope("forward/pallas_call")}
  %y = f32[8,16] add(%pallas_call.1, %state#1), {scope("norm/add")}
  %wide = f32[1,8,16] bitcast(%y)
  %new = f32[3,8,16] fusion(%kept, %wide, %i), kind=kLoop, calls=%put
  ROOT %next = (s32[], f32[8,16], f32[3,8,16]) tuple(%i, %y, %new)
}}

%condition (state: (s32[], f32[8,16], f32[3,8,16])) -> pred[] {{
  %state = (s32[], f32[8,16], f32[3,8,16]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %most = s32[] constant(3)
  ROOT %is_less = pred[] compare(%i, %most), direction=LT
}}

ENTRY %main (x: f32[8,32], w: f32[32,16], s: (s32[])) -> f32[8,16] {{
  %x = f32[8,32] parameter(0)
  %w = f32[32,16] parameter(1)
  %s = (s32[], f32[8,16], f32[3,8,16]) parameter(2)
  %loop = (s32[]) while(%s), condition=%condition, body=%body
  ROOT %out = f32[8,16] dot(%x, %w), lhs_contracting_dims={{1}}
}}
"""
ROW = 8 * 16 * 4  # bytes
INDEX = 4


def test_cost_of_each_part():
  assert traffic.by_part(TEXT) == {
    "attention": (3, 3 * 2 * ROW, 0),
    "products": (1, (8 * 32 + 32 * 16) * 4 + ROW, 2 * 8 * 32 * 16),
    "dropout": (3, 3 * (2 * ROW + INDEX), 0),
    "norm": (3, 3 * 3 * ROW, 0),
    "other layers": (3, 3 * (2 * ROW + INDEX), 0),
  }


def test_growth_names_the_part():
  def entry(num_bytes, launches=2, peak=10):
    cost = dict(launches=launches, flops=0)
    parts = dict(
      norm=cost | dict(bytes=num_bytes), dropout=cost | dict(bytes=100)
    )
    return dict(preset="enwik8", peak_bytes=peak, parts=parts)

  assert not list(traffic.growth(entry(900), entry(1000)))
  assert not list(traffic.growth(entry(1050), entry(1000)))
  (more,) = traffic.growth(entry(1100), entry(1000))
  assert more.startswith("enwik8: bytes grew from 1,100 to 1,200 (to accept")
  assert more.endswith("most of it in norm: +100")
  (more,) = traffic.growth(entry(1000, 3), entry(1000))
  assert more.startswith("enwik8: launches grew from 4 to 6")
  (more,) = traffic.growth(entry(1000, peak=11), entry(1000))
  assert more.startswith("enwik8: peak memory in bytes grew from 10 to 11")


def test_text_without_a_program_is_rejected():
  with pytest.raises(ValueError, match="no entry computation"):
    traffic.by_part("HloModule empty")
