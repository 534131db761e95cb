"""The attention of a trained network's heads on a given example.

The queries and keys of all drawn layers are collected in one pass of the
network. Then the pairs of each head, static or bound to these queries and
keys, are weighted.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer import atomic, model as model_lib, tables
from sparse_transformer.attention.content import selection, spans as spans_lib
from sparse_transformer.figures import head_maps as pictures
from sparse_transformer.figures.masks import MAX_LENGTH, MAX_PANELS
from sparse_transformer.model import pattern_params, transformer
from sparse_transformer.patterns import Pattern

MAX_LAYERS = 8  # that are drawn

Report = dict[str, Any]
# {layer: (q_BLHK, k_BLHK)}
Collected = dict[int, tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Head:
  """The attention of one head."""

  pattern: Pattern  # its pattern, which may be content-based
  pairs: int  # number of pairs
  keys_max: int  # the most keys of a query
  # Of the weights of a query, in bits; the mean over all queries that have
  # keys.
  entropy: float
  # Float32 [L], the weights of one query, -1 where it has no pair.
  query: np.ndarray
  # Float32 [cells, cells], joined pairs: the share of the weight of their
  # queries that is on these keys; -1 for cells without pairs.
  weights: np.ndarray


def collect(
  model: model_lib.Config, params: Any, tokens_L: np.ndarray
) -> Collected:
  """The queries and keys of layers, at most `MAX_LAYERS` of them.

  Args:
    model: the network.
    params: its parameters.
    tokens_L: symbols; at most as many as the network has positions.
  """
  drawn = min(MAX_LAYERS, model.num_layers)
  chosen = np.linspace(0, model.num_layers - 1, drawn).round().astype(int)
  shape = 1, len(tokens_L), model.num_heads, model.qk_width // model.num_heads
  sizes = transformer.stacks(model)

  @jax.jit
  def run(params, tokens_BL):
    network = transformer.bind(model, params)

    def attend(cache, layer, index, directions, q_BLHK, k_BLHK, v_BLHE):
      stack = layer + model.period * np.arange(sizes[layer])
      now = {
        int(number): jax.tree.map(
          functools.partial(jnp.where, index == place),
          (q_BLHK, k_BLHK),
          cache[number],
        )
        for place, number in enumerate(stack)
        if number in cache
      }
      inputs = q_BLHK, k_BLHK, v_BLHE
      out_BLHE, _ = network.attend(None, layer, index, directions, *inputs)
      return out_BLHE, cache | now

    empty = jnp.zeros(shape, model.dtype)
    cache = {int(number): (empty, empty) for number in chosen}
    return network.run_blocks(network.embed(tokens_BL), attend, cache)[1]

  return run(params, tokens_L[None])


def weigh(
  model: model_lib.Config,
  params: Any,
  collected: Collected,
  temperature: float = 1.0,
) -> Iterator[tuple[int, list[Head]]]:
  """The heads of each collected layer.

  Args:
    model: the network.
    params: its parameters.
    collected: from `collect`.
    temperature: divides the scores before their softmax.

  Yields:
    (layer, its heads).
  """
  network = transformer.bind(model, params)
  for layer, (q_BLHK, k_BLHK) in collected.items():
    patterns = model.patterns[layer]
    directions = pattern_params.directions(
      patterns,
      [layer],
      0,
      jax.tree.map(lambda x, layer=layer: x[layer], network.learned),
      q_BLHK.shape[-1],
    )
    bound = selection.bind_heads(patterns, q_BLHK, k_BLHK, directions)
    biases = _biases(patterns, directions, q_BLHK.shape[1])
    scale = temperature * math.sqrt(q_BLHK.shape[-1])
    q_HLK, k_HLK = (
      np.asarray(x[0], np.float32).swapaxes(0, 1) for x in (q_BLHK, k_BLHK)
    )
    heads = zip(patterns, bound, q_HLK / scale, k_HLK, biases, strict=True)
    yield layer, [_weigh(*head) for head in heads]


def _biases(patterns, directions, n):
  """What is added to the scores of each head: the log of its spans' weights."""
  i = np.arange(n)
  weights_HLM = spans_lib.weights(patterns, directions, i[:, None], i)
  if weights_HLM is None:
    return [None] * len(patterns)
  with np.errstate(divide="ignore"):  # log(0) is -inf: no weight
    return np.log(np.asarray(weights_HLM))


def _weigh(pattern, known, q_LK, k_LK, bias_LM):
  """A head, whose pattern is bound to its queries and keys: `known`."""
  n = len(q_LK)
  i = np.arange(n)
  mask_LM = np.asarray(known.mask(i[None, None, :, None], i))
  mask_LM = np.broadcast_to(mask_LM, (1, 1, n, n))[0, 0]
  scores_LM = q_LK @ k_LK.T
  if bias_LM is not None:
    scores_LM += bias_LM
    mask_LM = mask_LM & (bias_LM > -np.inf)
  scores_LM = np.where(mask_LM, scores_LM, -np.inf)
  largest_L1 = scores_LM.max(1, keepdims=True)
  scores_LM -= np.where(np.isfinite(largest_L1), largest_L1, 0)
  weights_LM = np.exp(scores_LM)
  sums_L1 = np.maximum(weights_LM.sum(1, keepdims=True), 1)
  weights_LM /= sums_L1
  # With p = exp(s) / z: -log p = log z - s.
  nats = np.log(sums_L1) - np.where(mask_LM, scores_LM, 0)
  bits = (weights_LM * nats).sum(1) / math.log(2)
  keys, shown = mask_LM.sum(1), pictures.shown_query(n)
  return Head(
    pattern,
    pairs=int(keys.sum()),
    keys_max=int(keys.max()),
    entropy=float(bits[keys > 0].mean()) if keys.any() else 0.0,
    query=np.where(mask_LM, weights_LM, -1)[shown],
    weights=pictures.join(weights_LM, mask_LM),
  )


def explain(
  model: model_lib.Config,
  params: Any,
  tokens_L: np.ndarray,
  temperature: float,
  folder: str | os.PathLike,
  title: str,
  **about: int,
) -> Report:
  """Draws the heads of a network on an example.

  Args:
    model: the network.
    params: its parameters.
    tokens_L: the example's symbols.
    temperature: divides the scores before their softmax.
    folder: where the pictures go, one for each layer, and the report as
      attention.json.
    title: what the pictures say of the example.
    **about: what the report says of it, such as its number.

  Returns:
    As JSON values: `about`, the number of `positions` that were used, what was
    measured of each of the `heads`, and the `pictures`.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  n = min(len(tokens_L), MAX_LENGTH)
  if n < len(tokens_L):
    title = f"{title}\nthe first {n:,} of {len(tokens_L):,} positions"
  rows, paths = [], []
  collected = collect(model, params, tokens_L[:n])
  for layer, heads in weigh(model, params, collected, temperature):
    paths.append(folder / f"layer_{layer}.png")
    pictures.panels(
      f"layer {layer} of {model.num_layers}, {title}",
      [f"head {i}: {head.pattern}" for i, head in enumerate(heads)],
      [(head.query, head.weights) for head in heads],
      model.shape,
    ).savefig(paths[-1])
    for i, head in enumerate(heads):
      measured = dict(
        pairs=head.pairs,
        keys_mean=head.pairs / n,
        keys_max=head.keys_max,
        entropy=head.entropy,
      )
      name = str(head.pattern)
      rows.append(dict(layer=layer, head=i, pattern=name, **measured))
  report = about | dict(
    positions=n,
    length=len(tokens_L),
    num_layers=model.num_layers,
    temperature=temperature,
    heads=rows,
    pictures=[str(path) for path in paths],
  )
  atomic.write_text(folder / "attention.json", json.dumps(report) + "\n")
  return report


COLUMNS = {
  "layer": "{layer}",
  "head": "{head}",
  "pattern": "{pattern}",
  "pairs": "{pairs:,}",
  "keys: mean": "{keys_mean:,.1f}",
  "max": "{keys_max:,}",
  "entropy": "{entropy:.2f}",
}


def render(report: Report) -> str:
  """The report as text."""
  lines = [list(COLUMNS)]
  for row in report["heads"]:
    lines.append([cell.format(**row) for cell in COLUMNS.values()])
  drawn = len(report["pictures"])
  notes = [
    "entropy: of a query's weights, in bits, at temperature"
    f" {report['temperature']:g}; the mean over queries"
  ]
  heads = 1 + max(row["head"] for row in report["heads"])
  if heads > MAX_PANELS:
    notes.append(f"the first {MAX_PANELS} of {heads} heads are drawn")
  if drawn < report["num_layers"]:
    notes.append(f"{drawn} of {report['num_layers']} layers are drawn")
  if report["positions"] < report["length"]:
    notes.append(
      f"the first {report['positions']:,} of {report['length']:,} positions"
      " are drawn; no later one changes their keys"
    )
  return "\n".join([tables.align(lines, right_from=3), *notes])
