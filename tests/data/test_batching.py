"""Tests of batching.py: the order of examples in batches."""

import numpy as np
import pytest

from sparse_transformer import data

EXAMPLES = np.arange(10, dtype=np.uint8)[:, None]


@pytest.mark.parametrize("batch_size", [1, 4, 10, 23])
def test_each_epoch_has_each_example_once_in_a_new_order(batch_size):
  batches = data.batches(EXAMPLES, batch_size, seed=0)
  steps = -(-30 // batch_size)
  flat = np.concatenate([batches[step] for step in range(steps)])[:30]
  epochs = flat.reshape(3, 10)
  np.testing.assert_array_equal(np.sort(epochs), [list(range(10))] * 3)
  assert len({tuple(epoch) for epoch in epochs}) == 3
