"""The executor for NVIDIA GPUs: three fused kernels.

One kernel computes the forward pass, one dq, and one dk and dv, each for all
heads and all parts of the patterns, in one launch or, where parts write to
different slots, in two; see `triton_kernels`.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax

from sparse_transformer.attention.contract import Case, Plan, Plans, number
from sparse_transformer.attention.executors import worklists
from sparse_transformer.patterns import Layout, Pattern

# Positions on a side of a tile, by dtype. With larger ones, the backward pass
# spills registers; with float32, also with wider queries and keys.
TILES = dict(bfloat16=64, float16=64, float32=32)
# Items may have two tiles of 64, so that each tile of the other side is read
# once for both. They are chosen where they take at most this share of the
# steps, so that the forward pass and dq run about as many instructions as with
# single tiles or fewer, and where they are enough to keep a GPU busy.
TALL, MAX_SHARE = 128, 0.6
WIDTHS = 16, 32, 64, 128
MAX_FLOAT32_WIDTH = 64  # of queries and keys
MIN_CAPABILITY = 8.0  # Ampere: bfloat16, TF32, asynchronous copies
# Programs that a GPU of 132 multiprocessors runs at a time, and the length of
# the pieces into which lists are cut that would keep it waiting.
PROGRAMS, PIECE = 3 * 132, 64
MAX_PIECES = 4  # of a list: each needs a slot of the size of all keys


class Triton(worklists.Fused):
  """Runs all heads and parts together on NVIDIA GPUs."""

  def unsupported(self, case: Case) -> str | None:
    if not self.interpret and case.platform != "cuda":
      return "it needs an NVIDIA GPU"
    widths = case.qk_width, case.value_width
    if not set(widths) <= {*WIDTHS}:
      return f"widths of heads must be among {WIDTHS}, got {widths}"
    tiles: tuple[int, ...] = (32,) if case.dtype == "float32" else (32, 64)
    if self._has_tall(case):
      tiles = (32, 64, TALL)
    if case.tile and case.tile not in tiles:
      return (
        f"in {case.dtype} with widths {widths}, the positions of a tile must be"
        f" among {tiles}, got tile={case.tile}; 0 chooses"
      )
    if self.interpret:
      return None
    if (capability := compute_capability(MIN_CAPABILITY)) < MIN_CAPABILITY:
      return (
        f"it needs a GPU of compute capability {MIN_CAPABILITY} or later, got"
        f" {capability}"
      )
    if case.dtype not in TILES:
      return f"its dtypes are {', '.join(TILES)}, got {case.dtype}"
    if case.dtype == "float32" and case.qk_width > MAX_FLOAT32_WIDTH:
      return (
        f"in float32, heads must have widths of at most {MAX_FLOAT32_WIDTH},"
        f" got {case.qk_width}"
      )
    return None

  def tile_size(self, part: Pattern, case: Case) -> int:
    """Items of two tiles have tiles of 64, as do the shares of devices."""
    del part
    tile = min(case.tile or TILES[case.dtype], TALL // 2)
    return worklists.check_tile(tile, case.length)

  def plans(self, patterns: tuple[Pattern, ...], case: Case) -> Plans:
    tile = self.tile_size(patterns[0], case)
    make = functools.partial(_make_work, patterns, case, tile)
    work = make(height=1)
    if 2 * tile == TALL and case.tile in (0, TALL) and self._has_tall(case):
      tall = make(height=2)
      fewest = min(len(tall.by_query.items), len(tall.by_key.items))
      is_enough = number(case.batch) * fewest >= PROGRAMS
      is_less = _num_steps(tall) <= MAX_SHARE * _num_steps(work)
      if case.tile or (is_enough and is_less):
        work = tall
    return [(Plan(None, tile, work), None)]

  def _has_tall(self, case):
    """Whether items may have two tiles: no registers spill."""
    is_narrow = max(case.qk_width, case.value_width) <= 64
    return self.interpret or (is_narrow and case.dtype != "float32")

  def shares(
    self, part: Pattern, layouts: Sequence[Layout], case: Case
  ) -> list[worklists.Work]:
    heads = case.num_heads, case.group
    return worklists.pad(worklists.make_shares(part, layouts, *heads))

  def kernels(self) -> Any:
    from sparse_transformer.attention.executors import triton_kernels

    return triton_kernels


def _make_work(patterns, case, tile, height):
  """The work of all heads, whose long lists of keys are split."""
  make = functools.partial(
    worklists.make_work,
    patterns,
    case.length,
    tile,
    group=case.group,
    height=height,
  )
  work = make()
  lengths = work.by_key.items[:, 4] - work.by_key.items[:, 2]
  # A list that takes longer than half of what each program has to do.
  share = number(case.batch) * lengths.sum() / (PROGRAMS // height)
  if lengths.max() <= max(PIECE, share / 2):
    return work
  return make(longest=max(PIECE, -(-int(lengths.max()) // MAX_PIECES)))


def _num_steps(work):
  """Steps of the items of both lists, each over one tile of the other side."""
  lists = work.by_query, work.by_key
  return sum((x.items[:, 4] - x.items[:, 2]).sum() for x in lists)


def compute_capability(without: float) -> float:
  """Lowest of the local GPUs; `without` if there are none."""
  names = {getattr(d, "compute_capability", "") for d in jax.local_devices()}
  known = [float(name) for name in names if re.fullmatch(r"\d+\.\d+", name)]
  return min(known, default=without)
