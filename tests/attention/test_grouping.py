"""Tests of attention/content/grouping.py against lists in Python."""

import functools
import itertools

import jax
import numpy as np
import pytest

from sparse_transformer.attention.content import grouping


def in_python(labels, num, tile):
  """(entries of each tile, label of each tile) of one row."""
  tiles = []
  for label in range(num):
    entries = [i for i, other in enumerate(labels) if other == label]
    while entries:
      entries, last = entries[tile:], entries[:tile]
      tiles.append((last + [-1] * (tile - len(last)), label))
  return tiles


def cases():
  random = np.random.RandomState(0)
  yield "random", random.randint(0, 6, (3, 50)), 5, 4
  yield "skewed", np.minimum(random.geometric(0.6, (2, 77)) - 1, 9), 9, 8
  yield "nothing", np.full((2, 9), 3), 3, 4
  yield "few entries", np.array([[6, 0, 3]]), 8, 2
  yield "one more than full tiles", np.repeat([[0, 1, 2]], 5, axis=1), 3, 4


CASES = {name: case for name, *case in cases()}


@pytest.mark.parametrize(
  "name, limit", [*((name, 2**31) for name in CASES), ("random", 299)]
)
def test_labels_fill_tiles_of_their_own_in_order(name, limit, monkeypatch):
  monkeypatch.setattr(grouping, "LIMIT", limit)
  labels_NE, num, tile = CASES[name]
  size = labels_NE.shape[1]
  found = jax.jit(
    functools.partial(
      grouping.group_by_label,
      num=num,
      tile=tile,
    )
  )(labels_NE)
  num_tiles = found.labels.shape[1]

  assert found.entries.shape == (len(labels_NE), num_tiles, tile)
  for row, labels in enumerate(labels_NE):
    expected = in_python(labels, num, tile)
    expected += [([-1] * tile, num)] * (num_tiles - len(expected))
    entries, of_tile = zip(*expected, strict=True)
    np.testing.assert_array_equal(found.entries[row], entries)
    np.testing.assert_array_equal(found.labels[row], of_tile)
    places = np.append(np.ravel(entries), -1)
    for entry, slot in enumerate(np.asarray(found.slots[row])):
      assert places[slot] == (entry if labels[entry] < num else -1)
    left_out = np.asarray(found.slots[row])[labels == num]
    assert (left_out == num_tiles * tile).all()

  assert found.slots.shape == (len(labels_NE), size)
  assert all(x.dtype == np.int32 for x in found)


@pytest.mark.parametrize(
  "size, num, tile",
  [
    (9, 4, 3),
    (3, 5, 2),
    (8, 1, 8),
  ],
)
def test_tiles_suffice_and_none_is_too_many(size, num, tile):
  shares = itertools.combinations_with_replacement(range(num), size)
  most = max(len(in_python(labels, num, tile)) for labels in shares)
  assert most == grouping.most_tiles(size, num, tile)
