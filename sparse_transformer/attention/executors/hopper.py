"""The executor for NVIDIA's Hopper GPUs: three fused kernels.

One launch computes the forward pass, one dq, and one dk and dv, each for all
heads and all parts with the same order of queries; see `hopper_kernels`. They
have been compiled for an H100 and an H200, but never run on one: only Pallas'
interpreter has run them. "auto" does not choose them.
"""

from typing import Any

import jax

from sparse_transformer.attention import contract, platforms
from sparse_transformer.attention.executors.block_executor import BlockExecutor

MIN_JAX = 0, 11, 2  # whose Mosaic GPU can compile and interpret the kernels
WIDTHS = 64, 128
DTYPES = "bfloat16", "float16"
CAPABILITY = 9.0  # later ones have no wgmma
WIDE_TILE = 64  # with wider heads, tiles of 128 spill registers


class Hopper(BlockExecutor):
  """Runs fused kernels on GPUs of compute capability 9."""

  TILES = 64, 128
  SMALLEST = 64
  STEP, PAIR = 64**2, 1  # in pairs: a guess, not measured
  ROWS = True

  def unsupported(self, case: contract.Case) -> str | None:
    if not self.interpret and case.platform != "cuda":
      return "it needs an NVIDIA GPU"
    if jax.__version_info__ < MIN_JAX:
      return f"it needs jax {'.'.join(map(str, MIN_JAX))} or later"
    if reason := self.unsupported_tile(case, self.tiles(case)):
      return reason
    if self.interpret:
      return None
    if others := platforms.compute_capabilities() - {CAPABILITY}:
      return f"it needs compute capability {CAPABILITY}, got {min(others)}"
    if case.dtype not in DTYPES:
      return f"it needs {' or '.join(DTYPES)}, got {case.dtype}"
    widths = case.qk_width, case.value_width
    if not set(widths) <= {*WIDTHS}:
      return f"widths of heads must be among {WIDTHS}, got {widths}"
    return None

  def tiles(self, case: contract.Case) -> tuple[int, ...]:
    widest = max(case.qk_width, case.value_width)
    return self.TILES if widest <= WIDTHS[0] else (WIDE_TILE,)

  def forward(
    self, plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, jax.Array]:
    if not self.interpret and keys.v.dtype != queries.q.dtype:
      raise contract.Unsupported(
        "backend=hopper needs values in the dtype of queries,"
        f" {queries.q.dtype}, got {keys.v.dtype}"
      )
    return super().forward(plan, queries, keys)

  def kernels(self) -> Any:
    from sparse_transformer.attention.executors import hopper_kernels

    return hopper_kernels
