"""The executor for TPUs: three fused kernels.

One launch computes the forward pass, one dq, and one dk and dv, each for all
heads and all parts with the same order of queries; see `mosaic_kernels`. They
have been compiled for TPUs, but never run on one: only Pallas' interpreter has
run them.
"""

from typing import Any

from sparse_transformer.attention import contract
from sparse_transformer.attention.executors.block_executor import BlockExecutor

WIDEST = 256
DTYPES = "bfloat16", "float32"


class Mosaic(BlockExecutor):
  """Runs fused kernels on TPUs."""

  TILES = 128, 256, 512  # with 1,024, VMEM may not suffice
  # In seconds, in all three kernels, as modelled: a step of a grid takes 0.35
  # microseconds, besides the instructions of the program compiled for a v5e, in
  # bfloat16.
  STEP, PAIR = 3 * 0.35e-6, 12e-12
  # Three tables of integers take 768 KiB of 1 MiB of scalar memory.
  MOST_STEPS = 2**16
  ROWS = False

  def unsupported(self, case: contract.Case) -> str | None:
    if not self.interpret and case.platform != "tpu":
      return "it needs a TPU"
    if reason := self.unsupported_tile(case, (32, 64, *self.TILES)):
      return reason
    if self.interpret:
      return None
    if case.dtype not in DTYPES:
      return f"it needs {' or '.join(DTYPES)}, got {case.dtype}"
    widths = case.qk_width, case.value_width
    if max(widths) > WIDEST:
      return f"widths of heads must be at most {WIDEST}, got {widths}"
    return None

  def kernels(self) -> Any:
    from sparse_transformer.attention.executors import mosaic_kernels

    return mosaic_kernels
