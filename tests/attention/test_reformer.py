"""`LSH` against the Reformer of the library transformers, if it is installed.

Theirs attends within two chunks of the sorted sequence, also to positions of
other buckets. Without these, and while no bucket exceeds a chunk, it is ours.
"""

import jax
import numpy as np
import pytest

from sparse_transformer.attention import attend
from sparse_transformer.patterns import LSH

torch = pytest.importorskip("torch")
reformer = pytest.importorskip("transformers.models.reformer.modeling_reformer")

LENGTH, HEADS, CHUNK, BUCKETS = 64, 2, 16, 16


def of_reformer(q_LHK):
  """Their weights [H, L, L], buckets [H, L] and rotations [H, D, K].

  Values are the rows of an identity, so that outputs are the weights.
  """
  n, width = LENGTH, q_LHK.shape[-1]
  assert width == n  # of queries and of values
  config = reformer.ReformerConfig(
    attention_head_size=width,
    num_attention_heads=HEADS,
    hidden_size=(HEADS + 1) * n,
    lsh_attn_chunk_length=CHUNK,
    num_buckets=BUCKETS,
    num_hashes=1,
    hash_seed=3,
    is_decoder=True,
  )
  layer = reformer.LSHSelfAttention(config).eval()
  inputs = np.concatenate([q_LHK.reshape(n, -1), np.eye(n)], axis=1)
  given = np.eye((HEADS + 1) * n)
  weights = {
    "query_key.weight": given[: HEADS * n],
    "value.weight": np.concatenate([given[HEADS * n :]] * HEADS),
  }
  as_tensor = lambda x: torch.tensor(np.float32(x))
  layer.load_state_dict({name: as_tensor(w) for name, w in weights.items()})
  with torch.no_grad():
    found = layer(as_tensor(inputs[None]))
  torch.manual_seed(config.hash_seed)
  rotations = torch.randn((HEADS, width, 1, BUCKETS // 2))
  return (
    found.hidden_states.numpy().reshape(n, HEADS, n).swapaxes(0, 1),
    found.buckets.numpy()[0, :, 0],
    rotations.numpy()[:, :, 0].swapaxes(1, 2),
  )


@pytest.mark.parametrize("seed", [0, 1])
def test_weights_are_those_of_reformer_within_buckets(seed):
  q_LHK = np.random.RandomState(seed).standard_normal((LENGTH, HEADS, LENGTH))
  theirs, buckets, rotations = of_reformer(q_LHK)
  same = buckets[:, :, None] == buckets[:, None]
  assert 1 < same.sum(2).max() <= CHUNK  # no bucket exceeds a chunk
  theirs = theirs * same
  total = theirs.sum(2, keepdims=True)
  alone = total == 0
  assert 0 < alone.sum() < alone.size
  expected = np.where(alone, np.eye(LENGTH), theirs / np.where(alone, 1, total))

  pattern = LSH(CHUNK, BUCKETS)
  unit = q_LHK / np.linalg.norm(q_LHK, axis=-1, keepdims=True)
  v = np.broadcast_to(np.eye(LENGTH)[:, None], (LENGTH, HEADS, LENGTH))
  # Their scores are not divided by the root of the width.
  inputs = (np.float32(x[None]) for x in (q_LHK * LENGTH**0.5, unit, v))
  found = jax.jit(attend, static_argnums=3)(
    *inputs, pattern, directions={pattern: rotations}
  )
  np.testing.assert_allclose(found[0].swapaxes(0, 1), expected, atol=1e-5)
