"""The executor for NVIDIA GPUs: three fused kernels.

One kernel computes the forward pass, one dq, and one dk and dv, each for all
heads and all parts of the patterns, in one launch or, where parts write to
different slots, in two; see `triton_kernels`.
"""

import functools
from collections.abc import Sequence
from typing import Any

from sparse_transformer.attention import platforms
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
# Of queries and of values together, where a block of threads has 99 KiB of
# shared memory and tiles have 64 positions.
MAX_WIDTHS = 192
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
    tiles = tuple(t for t in (32, 64) if t <= self._largest_tile(case))
    if self._has_tall(case):
      tiles = (*tiles, TALL)
    if case.tile and case.tile not in tiles:
      return (
        f"in {case.dtype} with widths {widths}, the positions of a tile must be"
        f" among {tiles}, got tile={case.tile}; 0 chooses"
      )
    if self.interpret:
      return None
    capabilities = platforms.compute_capabilities()
    if min(capabilities, default=MIN_CAPABILITY) < MIN_CAPABILITY:
      return (
        f"it needs a GPU of compute capability {MIN_CAPABILITY} or later, got"
        f" {min(capabilities)}"
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
    tile = min(case.tile or self._largest_tile(case), TALL // 2)
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

  def _largest_tile(self, case):
    """The positions of the largest tile that fits in shared memory."""
    if case.qk_width + case.value_width > MAX_WIDTHS and not self.interpret:
      if any(map(_has_little_memory, platforms.compute_capabilities())):
        return 32
    return TILES.get(case.dtype, 64)

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


def _has_little_memory(capability: float) -> bool:
  """Whether blocks have 99 KiB of shared memory, not 163 or 227.

  RTX 30, 40 and 50, A10, A6000, L4 and L40 do. Source: CUDA C++ Programming
  Guide, "Technical Specifications per Compute Capability".
  """
  return capability in (8.6, 8.9) or int(capability) == 12
