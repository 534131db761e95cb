"""The backend for NVIDIA GPUs, with the fused kernels of `triton_kernels`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from sparse_transformer.attention import contract, platforms
from sparse_transformer.attention.backends import items
from sparse_transformer.attention.contract import Plan, Plans, Request
from sparse_transformer.patterns import Layout, Pattern

# Positions on a side of a tile, by dtype. With larger tiles, the backward pass
# spills registers. In float32, it also does so with wider queries and keys, see
# `MAX_FLOAT32_WIDTH`.
TILES = dict(bfloat16=64, float16=64, float32=32)
WIDTHS = 16, 32, 64, 128
MAX_FLOAT32_WIDTH = 64  # the largest width of queries and keys
# The largest widths K + E, by major compute capability, for which kernels with
# tiles of 64 neither spill registers nor exceed the shared memory of a block.
# They were found by compiling kernels, as `make targets-test` does. GPUs of
# capability 9 and 10 need fewer registers, because products read their operands
# from shared memory. RTX GPUs are not listed, because they have only 99 KiB of
# shared memory instead of 163 or 227 KiB. Source: CUDA Programming Guide,
# "Compute Capabilities".
MAX_WIDTHS = {8: 128, 9: 256, 10: 256}
# The largest width on all other GPUs. It also applies to capability 8 with
# segments, a soft cap, or KV heads that several query heads share.
LEAST_WIDTHS = 64


@dataclasses.dataclass(frozen=True)
class Triton(contract.Backend):
  """Runs all heads and parts together on NVIDIA GPUs.

  A request needs only one plan, so each launch has enough work for all
  processors. Kernels read rows by position, so parts with different orders need
  no copies of arrays.
  """

  # whether to interpret kernels, which works on any platform
  interpret: bool = False

  def unsupported(self, request: Request) -> str | None:

    if not self.interpret and request.platform != "cuda":
      return "it needs an NVIDIA GPU"
    if request.features.bias:
      return "it does not have a bias"
    if lacking := platforms.lacks(self.kernels):
      return lacking

    # Products in Triton require matrices whose sides are powers of 2, at least
    # 16.
    widths = request.qk_width, request.value_width
    if not set(widths) <= set(WIDTHS):
      return f"widths of heads must be among {WIDTHS}, got {widths}"
    tiles = tuple(t for t in (32, 64) if t <= self._largest_tile(request))
    if request.tile and request.tile not in tiles:
      return (
        f"in {request.dtype} with widths {widths}, the positions of a tile must"
        f" be among {tiles}, got tile={request.tile}; 0 chooses"
      )

    # The interpreter has no hardware limits.
    if self.interpret:
      return None

    if old := platforms.before_ampere():
      return old
    if request.dtype not in TILES:
      return f"its dtypes are {', '.join(TILES)}, got {request.dtype}"
    if request.features.mixed_dtypes:
      return "it does not have values of another dtype"
    if request.features.symbolic_batch:
      return "it does not have a symbolic batch"
    if request.dtype == "float32" and request.qk_width > MAX_FLOAT32_WIDTH:
      return (
        f"in float32, heads must have widths of at most {MAX_FLOAT32_WIDTH},"
        f" got {request.qk_width}"
      )
    return None

  def _largest_tile(self, request):
    """Returns the largest tile size that fits in registers and shared memory.

    Args:
      request: the request. Its widths, dtype and features determine how many
        registers and how much shared memory a program needs.

    Returns:
      64 or 32.
    """
    # All GPUs of the machine run the same program, so the weakest one sets the
    # limit.
    capabilities = [] if self.interpret else platforms.compute_capabilities()
    most = 256
    for capability in capabilities:
      most = min(most, MAX_WIDTHS.get(int(capability), LEAST_WIDTHS))

    # These features need more registers, which capabilities 9 and 10 have.
    features = request.features
    needs_more = features.segments or features.softcap or request.group > 1
    if most < 256 and needs_more:
      most = LEAST_WIDTHS

    is_wide = request.qk_width + request.value_width > most
    return 32 if is_wide else TILES.get(request.dtype, 64)

  def tile_size(self, part: Pattern, request: Request) -> int:
    del part
    tile = request.tile or self._largest_tile(request)
    return contract.fit_tile(tile, request.length)

  def plans(self, request: Request) -> Plans:
    tile = self.tile_size(request.patterns[0], request)
    work = items.work_by_position(
      request.patterns, request.length, tile, request.group
    )
    heads = tuple(range(request.num_heads))
    return [(Plan(None, tile, work), heads)]

  def device_tables(
    self, part: Pattern, layouts: Sequence[Layout], request: Request
  ) -> list[items.Work]:
    works = items.make_shares(part, layouts, request.num_heads, request.group)
    return items.pad(works)

  def forward(
    self,
    plan: Plan,
    queries: contract.Queries,
    keys: contract.Keys,
  ) -> tuple[jax.Array, jax.Array]:
    return self.kernels().forward(plan, queries, keys, self.interpret)

  def backward(
    self,
    plan: Plan,
    queries: contract.Queries,
    keys: contract.Keys,
  ) -> tuple[jax.Array, ...]:
    return self.kernels().backward(plan, queries, keys, self.interpret)

  def kernels(self) -> Any:
    """Returns the module with the kernels, which is imported only if needed."""
    from sparse_transformer.attention.backends import triton_kernels

    return triton_kernels
