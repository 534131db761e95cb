"""What is drawn of trained heads is what the network computes."""

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
    found = []
    for layer, of_layer in enumerate(network.patterns):
      one = jax.tree.map(lambda p, i=layer: p[i], params["blocks"])

      def attend(q, k, v, of_layer=of_layer):
        found.append((q, k))
        return attention.attend(q, k, v, of_layer, backend="dense"), None

      x_BLD = x_BLD + nnx.merge(graph, one)(x_BLD, attend)[0]

    return found

  collected = head_statistics.collect(network, params, tokens_BL[0])

  assert list(collected) == [0, 1, 2, 3, 4]
  for found, expected in zip(collected.values(), in_turn(params), strict=True):
    for x, y in zip(found, expected, strict=True):
      np.testing.assert_allclose(
        x,
        y,
        rtol=1e-4,
        atol=1e-5,
      )


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
  ((layer, found),) = head_statistics.weigh(network, params, {0: (q, k)})
  centroids = params["centroids"]["3"][0]
  directions = {of_layer[2]: centroids}
  mask = np.asarray(find_pairs(of_layer, q, k, directions))[0]
  scores = np.einsum("lhk,mhk->hlm", q[0], k[0]) / np.sqrt(4)
  weights = np.exp(scores) * mask
  sink = np.exp(params["sinks"][0])[:, None, None] if sinks else 0
  weights /= weights.sum(-1, keepdims=True) + sink
  shares = np.append(weights, abs(1 - weights.sum(-1, keepdims=True)), -1)
  entropy = stats.entropy(shares, base=2, axis=-1).mean(-1)
  size = -(-n // cells)
  starts = np.arange(0, n, size)
  for h, head in enumerate(found):
    assert head.pattern == str(of_layer[h])
    assert head.pairs == mask[h].sum()
    assert head.entropy == pytest.approx(entropy[h], rel=1e-4)
    query = int(n * 0.71)
    expected = np.where(mask[h, query], weights[h, query], -1)
    np.testing.assert_allclose(head.weights_L, expected, atol=1e-6)
    joined = np.add.reduceat(weights[h], starts, 0)
    joined = np.add.reduceat(joined, starts, 1)
    joined /= np.diff(starts, append=n)[:, None]
    is_empty = ~np.logical_or.reduceat(
      np.logical_or.reduceat(mask[h], starts, 0), starts, 1
    )
    joined[is_empty] = -1
    np.testing.assert_allclose(head.cells, joined, atol=1e-6)


def test_color_is_that_of_a_weight_relative_to_the_largest():
  weights = np.array([[-1, 0, 0.2], [0.1, 0.05, -1]])
  painted = head_statistics.paint(weights, weights.max(1, keepdims=True))
  half = (PALE + (DARK - PALE) / 2).round()
  np.testing.assert_array_equal(
    painted, [[WHITE, PALE, DARK], [DARK, half, WHITE]]
  )


def test_picture_has_both_views_of_each_head(tmp_path):
  n = 37  # the last row of the data is not full
  query, matrix = np.full(n, -1.0), np.full((n, n), -1.0)
  query[3], matrix[range(n), range(n)] = 1, 1
  head = head_statistics.Head(
    pattern="one", pairs=n, entropy=0.0, weights_L=query, cells=matrix
  )
  figure = head_statistics.draw_heads("a title", [head] * 2, (8, 5))
  first, _, below, _ = figure.axes
  in_data = first.get_images()[0].get_array().reshape(-1, 3)

  assert in_data.shape == (40, 3)
  np.testing.assert_array_equal(in_data[3], DARK)
  assert (np.delete(in_data, 3, 0) == WHITE).all()
  shown = below.get_images()[0].get_array()
  np.testing.assert_array_equal((shown == DARK).all(-1), np.eye(n, dtype=bool))
  many = head_statistics.draw_heads("a title", [head] * 20, (8, 5))
  many.savefig(tmp_path / "p.png")
  with Image.open(tmp_path / "p.png") as image:
    assert image.width == 12 * masks.PANEL * style.DPI
