"""The backend that calls cuDNN attention, for dense patterns."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from sparse_transformer.attention import contract, platforms
from sparse_transformer.attention.contract import Plan, Plans, Request
from sparse_transformer.attention.heads import heads_of_parts
from sparse_transformer.patterns import Causal, Full, Pattern, shorten

DTYPES = "bfloat16", "float16"
MULTIPLE, MAX_WIDTH = 8, 128  # widths of heads; other multiples are padded
MAX_SEQUENCES = 2**16 - 1  # the most thread blocks along an axis of a grid
TILE = 128  # used for estimates, because cuDNN does not report its tile


@dataclasses.dataclass(frozen=True)
class Cudnn(contract.Backend):
  """Runs heads that see all keys, or all keys up to the query.

  cuDNN could also run windows. It could run columns, if each column were passed
  as a separate sequence. This backend does neither, because the Triton kernels
  were faster for windows and columns of 128 (docs/performance.md).
  """

  # "xla" runs the same function on any platform.
  implementation: Literal["cudnn", "xla"] = "cudnn"

  def unsupported(self, request: Request) -> str | None:

    if lacking := request.features.asked:
      return f"it does not support {', '.join(lacking)}"
    if request.tile:
      return "its tiles cannot be chosen"
    for pattern in request.patterns:
      if not isinstance(pattern, Causal | Full):
        return f"{shorten(pattern)} is not dense"
    if max(request.batch or 1, request.num_heads) > MAX_SEQUENCES:
      return f"it has more than {MAX_SEQUENCES} sequences or heads"

    # XLA runs the same function without cuDNN's limits.
    if self.implementation == "xla":
      return None
    if request.platform != "cuda":
      return "it needs an NVIDIA GPU"

    if old := platforms.before_ampere():
      return old
    if request.dtype not in DTYPES:
      return f"its dtypes are {', '.join(DTYPES)}, got {request.dtype}"
    if request.length % 2 and Full() in request.patterns:
      return "JAX has gradients of Full() at even lengths only"
    if (width := max(request.qk_width, request.value_width)) > MAX_WIDTH:
      return f"widths of heads must be at most {MAX_WIDTH}, got {width}"
    return None

  def tile_size(self, part: Pattern, request: Request) -> int:
    del part
    return contract.fit_tile(TILE, request.length)

  def plans(self, request: Request) -> Plans:
    return [
      (Plan(part, TILE, None), heads)
      for part, heads in heads_of_parts(request.patterns, request.length)
    ]

  def forward(
    self,
    plan: Plan,
    queries: contract.Queries,
    keys: contract.Keys,
  ) -> tuple[jax.Array, jax.Array]:
    """Computes outputs, and returns zeros instead of the log-sum-exp.

    The log-sum-exp is needed only to merge several plans or if the caller
    requests it. With this backend, neither happens.
    """
    out_BLHE, _ = self._vjp(plan, queries, keys)
    lse_BLH = jnp.zeros_like(queries.q[..., 0], jnp.float32)
    return out_BLHE, lse_BLH

  def backward(
    self,
    plan: Plan,
    queries: contract.Queries,
    keys: contract.Keys,
  ) -> tuple[jax.Array, ...]:
    _, gradients = self._vjp(plan, queries, keys)
    return gradients(queries.dout)

  def _vjp(self, plan, queries, keys):
    """Differentiates `_attend` with `jax.vjp`.

    Both `forward` and `backward` call this method, so each of them computes the
    forward pass. If a block is recomputed in the backward pass, XLA still runs
    its forward pass only once.

    Returns:
      out_BLHE, and a function that maps the gradient of out_BLHE to the
      gradients of q, k and v.
    """
    attend = functools.partial(self._attend, plan)
    return jax.vjp(attend, queries.q, keys.k, keys.v)

  def _attend(self, plan, q_BLHK, k_BMGK, v_BMGE):
    """Calls JAX's attention, with arrays padded to supported shapes."""
    n = q_BLHK.shape[1]
    qk_width = q_BLHK.shape[3]
    value_width = v_BMGE.shape[3]
    # Zeros in the width change no products, and only add outputs that are cut
    # off.
    width = -(-max(qk_width, value_width) // MULTIPLE) * MULTIPLE

    is_causal = plan.pattern == Causal()
    # JAX has gradients for even lengths only. Padding is safe with a causal
    # mask, because no query sees the added key at the end.
    padding = n % 2 * is_causal

    def pad(x):
      sizes = (0, 0), (0, padding), (0, 0), (0, width - x.shape[3])
      return jnp.pad(x, sizes)

    out_BLHE = jax.nn.dot_product_attention(
      pad(q_BLHK),
      pad(k_BMGK),
      pad(v_BMGE),
      scale=plan.scores.factor(qk_width),
      is_causal=is_causal,
      implementation=self.implementation,
    )
    return out_BLHE[:, :n, :, :value_width]
