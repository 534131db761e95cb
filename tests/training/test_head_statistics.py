"""What is drawn of trained heads is what the network computes."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import networks
from PIL import Image
from scipy import stats

from sparse_transformer import attention
from sparse_transformer.attention import find_pairs
from sparse_transformer.figures import masks, style
from sparse_transformer.model import transformer
from sparse_transformer.model.block import ResidualBlock
from sparse_transformer.patterns import (
  LSH,
  Block,
  Local,
  Routing,
  Strided,
  TopBlocks,
)
from sparse_transformer.training.reports import head_statistics

WHITE, PALE, DARK = map(style.rgb, ("#ffffff", style.PALER, style.DARK))


def test_queries_and_keys_are_those_of_each_layer():
  # Two periods and one layer more.
  patterns = ((Local(3), Strided(4)), (Strided(4), Local(5)))
  network = networks.config(
    num_layers=5,
    patterns=(patterns * 3)[:5],
    backend="dense",
  )
  params = networks.random_params(network, 0.3)
  tokens_BL = networks.tokens(network, batch=1)
  graph = nnx.graphdef(ResidualBlock(network, rngs=nnx.Rngs(0)))

  @jax.jit
  def in_turn(params):
    x_BLD = transformer.bind(network, params).embed(tokens_BL)
    pairs = []
    for layer, of_layer in enumerate(network.patterns):
      one = jax.tree.map(lambda p, i=layer: p[i], params["blocks"])

      def attend(q, k, v, of_layer=of_layer):
        pairs.append((q, k))
        return attention.attend(q, k, v, of_layer, backend="dense"), None

      x_BLD += nnx.merge(graph, one)(x_BLD, attend)[0]

    return pairs

  close = functools.partial(
    np.testing.assert_allclose,
    rtol=1e-4,
    atol=1e-5,
  )
  collected = head_statistics.collect(network, params, tokens_BL[0])
  assert list(collected) == [0, 1, 2, 3, 4]
  jax.tree.map(close, [*collected.values()], in_turn(params))


def in_cells(reduce, matrix, starts):
  """The result of a ufunc for each cell of a matrix."""
  rows = reduce.reduceat(matrix, starts, axis=0)
  return reduce.reduceat(rows, starts, axis=1)


@pytest.mark.parametrize(
  "cells, sinks",
  [
    (7, False),
    (256, True),
  ],
)
def test_weights_are_those_of_the_realized_pairs(cells, sinks, monkeypatch):
  monkeypatch.setattr(masks, "MAX_CELLS", cells)
  of_layer = Block(4) | TopBlocks(4, 1), LSH(3, 4), Routing(3, 5), Local(3)
  network = networks.config(
    num_layers=1,
    num_heads=4,
    width=16,
    patterns=(of_layer,),
    sinks=sinks,
  )
  params = networks.random_params(network, 0.3)
  n = 20
  random = np.random.RandomState(0)
  q, k = random.standard_normal((2, 1, n, 4, 4)).astype(np.float32)
  ((layer, heads),) = head_statistics.weigh(network, params, {0: (q, k)})

  directions = {of_layer[2]: params["centroids"]["3"][0]}
  masks_HLM = np.asarray(find_pairs(of_layer, q, k, directions))[0]
  scores = np.einsum("lhk,mhk->hlm", q[0], k[0]) / np.sqrt(4)
  query = int(n * 0.71)
  starts = np.arange(0, n, -(-n // cells))
  sizes = np.diff(starts, append=n)
  assert layer == 0
  for h, head in enumerate(heads):
    mask = masks_HLM[h]
    weights = np.exp(scores[h]) * mask
    sink = np.exp(params["sinks"][0, h]) if sinks else 0
    weights /= weights.sum(1, keepdims=True) + sink
    of_sink = abs(1 - weights.sum(1, keepdims=True))
    shares = np.append(weights, of_sink, axis=1)
    entropy = stats.entropy(shares, base=2, axis=1).mean()
    assert head.pattern == str(of_layer[h])
    assert head.pairs == mask.sum()
    assert head.entropy == pytest.approx(entropy, rel=1e-4)

    expected = np.where(mask[query], weights[query], -1)
    np.testing.assert_allclose(head.weights_L, expected, atol=1e-6)
    joined = in_cells(np.add, weights, starts) / sizes[:, None]
    has_pairs = in_cells(np.logical_or, mask, starts)
    expected = np.where(has_pairs, joined, -1)
    np.testing.assert_allclose(head.cells, expected, atol=1e-6)


def test_color_is_that_of_a_weight_relative_to_the_largest():
  weights = np.array([[-1, 0, 0.2], [0.1, 0.05, -1]])
  largest = weights.max(1, keepdims=True)
  painted = head_statistics.paint(weights, largest)
  half = (PALE + (DARK - PALE) / 2).round()
  expected = [[WHITE, PALE, DARK], [DARK, half, WHITE]]
  np.testing.assert_array_equal(painted, expected)


def test_picture_has_both_views_of_each_head(tmp_path):
  n = 37  # the last row of the data is not full
  query = np.full(n, -1.0)
  query[3] = 1
  matrix = np.full((n, n), -1.0)
  np.fill_diagonal(matrix, 1)
  head = head_statistics.Head(
    pattern="one",
    pairs=n,
    entropy=0.0,
    weights_L=query,
    cells=matrix,
  )
  figure = head_statistics.draw_heads("a title", [head] * 2, (8, 5))
  first, _, below, _ = figure.axes
  in_data = first.get_images()[0].get_array().reshape(-1, 3)
  assert in_data.shape == (40, 3)
  np.testing.assert_array_equal(in_data[3], DARK)
  assert (np.delete(in_data, 3, axis=0) == WHITE).all()

  shown = below.get_images()[0].get_array()
  is_dark = (shown == DARK).all(-1)
  np.testing.assert_array_equal(is_dark, np.eye(n, dtype=bool))

  many = head_statistics.draw_heads("a title", [head] * 20, (8, 5))
  many.savefig(tmp_path / "p.png")
  with Image.open(tmp_path / "p.png") as image:
    assert image.width == 12 * masks.PANEL * style.DPI
