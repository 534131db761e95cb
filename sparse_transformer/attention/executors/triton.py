"""The executor for NVIDIA GPUs: fused kernels, see `triton_kernels`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from sparse_transformer.attention import contract, platforms
from sparse_transformer.attention.contract import Case, Plan, Plans
from sparse_transformer.attention.executors import items
from sparse_transformer.patterns import Layout, Pattern

# Positions on a side of a tile, by dtype. With larger ones, the backward pass
# spills registers; with float32, also with wider queries and keys.
TILES = dict(bfloat16=64, float16=64, float32=32)
WIDTHS = 16, 32, 64, 128
MAX_FLOAT32_WIDTH = 64  # of queries and keys
MIN_CAPABILITY = 8.0  # Ampere: bfloat16, TF32, asynchronous copies
# Widths K + E up to which kernels with tiles of 64 neither spill registers nor
# exceed the shared memory of a block, by major compute capability: as compiled
# by `make targets-test`. On 9 and 10, products read shared memory. RTX GPUs
# have 99 KiB of it, not 163 or 227. Source: CUDA Programming Guide, "Compute
# Capabilities".
MAX_WIDTHS = {8: 128, 9: 256, 10: 256}
LEAST_WIDTHS = 64  # on other GPUs, and on these with segments or a soft cap


@dataclasses.dataclass(frozen=True)
class Triton(contract.Executor):
  """Runs all heads and parts together on NVIDIA GPUs."""

  interpret: bool = False  # whether to interpret the kernels, on any platform

  def unsupported(self, case: Case) -> str | None:
    if not self.interpret and case.platform != "cuda":
      return "it needs an NVIDIA GPU"
    widths = case.qk_width, case.value_width
    if not set(widths) <= {*WIDTHS}:
      return f"widths of heads must be among {WIDTHS}, got {widths}"
    tiles = tuple(t for t in (32, 64) if t <= self._largest_tile(case))
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
    if lacking := contract.NOT_IN_KERNELS & {*case.others}:
      return f"it does not have {' or '.join(sorted(lacking))}"
    if case.dtype == "float32" and case.qk_width > MAX_FLOAT32_WIDTH:
      return (
        f"in float32, heads must have widths of at most {MAX_FLOAT32_WIDTH},"
        f" got {case.qk_width}"
      )
    return None

  def _largest_tile(self, case):
    """The positions of the largest tile that kernels compile with."""
    found = [] if self.interpret else platforms.compute_capabilities()
    of_each = [MAX_WIDTHS.get(int(x), LEAST_WIDTHS) for x in found]
    most = min(of_each, default=256)
    more = {"segments", "a soft cap"} & {*case.others}  # others cost nothing
    if most < 256 and (more or case.group > 1):
      most = LEAST_WIDTHS
    is_wide = case.qk_width + case.value_width > most
    return 32 if is_wide else TILES.get(case.dtype, 64)

  def tile_size(self, part: Pattern, case: Case) -> int:
    del part
    tile = case.tile or self._largest_tile(case)
    return contract.fit_tile(tile, case.length)

  def plans(self, patterns: tuple[Pattern, ...], case: Case) -> Plans:
    tile = self.tile_size(patterns[0], case)
    work = items.work_by_position(patterns, case.length, tile, case.group)
    return [(Plan(None, tile, work), None)]

  def shares(
    self, part: Pattern, layouts: Sequence[Layout], case: Case
  ) -> list[items.Work]:
    heads = case.num_heads, case.group
    return items.pad(items.make_shares(part, layouts, *heads))

  def forward(
    self, plan: Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, jax.Array]:
    return self.kernels().forward(plan, queries, keys, self.interpret)

  def backward(
    self, plan: Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, ...]:
    return self.kernels().backward(plan, queries, keys, self.interpret)

  def kernels(self) -> Any:
    """The module with the kernels, imported only where they run."""
    from sparse_transformer.attention.executors import triton_kernels

    return triton_kernels
