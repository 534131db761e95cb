"""The attention of a trained network's heads on a given example."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr

from sparse_transformer import atomic, model as model_lib, tables
from sparse_transformer.attention import bias_at, find_pairs
from sparse_transformer.figures import masks, style
from sparse_transformer.model import options, transformer

MAX_LAYERS = 8  # maximum number of layers that are drawn

Report = dict[str, Any]
Collected = dict[int, tuple[jax.Array, jax.Array]]  # {layer: (q_BLHK, k_BLHK)}


@dataclasses.dataclass(frozen=True)
class Head:
  """The attention of one head. A weight of -1 marks a pair outside its mask.

  Attributes:
    pattern: the pattern of the head, as text.
    pairs: the number of pairs in its mask.
    entropy: the entropy of a query's weights in bits, averaged over queries.
    weights_L: the weights of the query that `masks.shown_query` selects.
    cells: the weights of all queries, merged into the cells of a picture.
  """

  pattern: str
  pairs: int
  entropy: float
  weights_L: np.ndarray
  cells: np.ndarray


def collect(
  model: model_lib.Config, params: Any, tokens_L: np.ndarray
) -> Collected:
  """Collects queries and keys of some layers in one pass through the network.

  Args:
    model: the config of the network.
    params: its parameters.
    tokens_L: an example, integers [L].

  Returns:
    {layer: (q_BLHK, k_BLHK)} for at most `MAX_LAYERS` layers. Query heads that
    share a KV head have equal keys.
  """
  # Choose layers at equal distances, including the first and the last.
  num_drawn = min(MAX_LAYERS, model.num_layers)
  spread = np.linspace(0, model.num_layers - 1, num_drawn)
  drawn = spread.round().astype(int)
  # The slot to which each layer is written. Layers that are not drawn have a
  # slot out of bounds, and JAX drops writes to it.
  slots = np.full(model.num_layers, num_drawn)
  slots[drawn] = np.arange(num_drawn)
  period = model_lib.period(model)

  @jax.jit
  def run(params, tokens_BL):
    network = transformer.bind(model, params)

    def attend(kept, layer, index, inputs):
      # Layers are scanned in periods: `index` is the index of the period, and
      # `layer` the index within a period.
      number = layer + period * index
      slot = jnp.asarray(slots)[number]

      # Repeat keys for the query heads that share a KV head.
      group = model.num_heads // model.num_key_heads
      k_BLHK = jnp.repeat(inputs.k_BLGK, group, axis=2)
      both = jnp.stack([inputs.q_BLHK, k_BLHK])
      kept = kept.at[slot].set(both, mode="drop")
      return network.attend(kept, layer, index, inputs)

    batch, length = tokens_BL.shape
    shape = (
      num_drawn,
      2,  # queries and keys
      batch,
      length,
      model.num_heads,
      model.head_width,
    )
    _, kept, _ = network.run_blocks(
      network.embed(tokens_BL),
      attend,
      jnp.zeros(shape, model.dtype),
    )
    return kept

  kept = run(params, tokens_L[None])
  return {int(layer): tuple(kept[i]) for i, layer in enumerate(drawn)}


def weigh(
  model: model_lib.Config, params: Any, collected: Collected
) -> Iterator[tuple[int, list[Head]]]:
  """Computes the attention of heads from the definitions of their patterns.

  This function uses dense matrices instead of a backend, because a picture
  should show what a pattern means, not how a backend executes it.

  Args:
    model: the config of the network.
    params: its parameters.
    collected: queries and keys, from `collect`.

  Yields:
    (layer, its heads) for each layer in `collected`.
  """
  # Options of the network, such as rotary positions or sinks, change queries
  # and keys and add to the scores.
  arrays = options.arrays(model, params)
  for layer, (q_BLHK, k_BLHK) in collected.items():
    patterns = model.patterns[layer]
    layer_arrays = jax.tree.map(lambda x, layer=layer: x[layer], arrays)
    inputs = options.prepare(
      model,
      options.Layer(patterns, 0, layer_arrays),
      options.Inputs(
        q_BLHK=q_BLHK,
        k_BLGK=k_BLHK,
        v_BLGE=k_BLHK,
      ),
    )
    directions = inputs.keywords.get("directions", {})
    mask_BHLM = find_pairs(patterns, q_BLHK, k_BLHK, directions)
    at = np.arange(q_BLHK.shape[1])
    bias_HD = inputs.keywords.get("bias_HD")
    sinks_H = inputs.keywords.get("sinks_H")

    heads = []
    for head, pattern in enumerate(patterns):
      q_LK = np.asarray(q_BLHK[0, :, head], np.float32)
      k_MK = np.asarray(k_BLHK[0, :, head], np.float32)
      scores_LM = q_LK / math.sqrt(q_LK.shape[-1]) @ k_MK.T
      mask_LM = np.asarray(mask_BHLM[0, head])
      if bias_HD is not None:
        bias_LM = bias_at(bias_HD, at[:, None] - at[None])[head]
        scores_LM = scores_LM + bias_LM
        mask_LM = mask_LM & np.asarray(bias_LM > -np.inf)
      sink = -np.inf if sinks_H is None else sinks_H[head]
      heads.append(_measure(str(pattern), scores_LM, mask_LM, sink))
    yield layer, heads


def _measure(pattern, scores_LM, mask_LM, sink):
  """Returns the `Head` of scores and a mask; a sink of -inf is no sink."""
  # A sink acts as one more key with a constant score, which all queries see.
  margin = (0, 0), (0, 1)
  scores = jnp.pad(
    scores_LM,
    margin,
    constant_values=sink,
  )
  where = np.pad(
    mask_LM,
    margin,
    constant_values=sink > -np.inf,
  )
  weights = np.asarray(jax.nn.softmax(scores, where=where))

  # Average over the queries that have keys. The entropy includes the sink.
  entropy_L = entr(weights).sum(1) / math.log(2)
  entropies = entropy_L[mask_LM.any(1)]
  weights_LM = weights[:, :-1]
  query = masks.shown_query(len(mask_LM))
  return Head(
    pattern=pattern,
    pairs=int(mask_LM.sum()),
    entropy=float(entropies.mean()) if len(entropies) else 0.0,
    weights_L=np.where(mask_LM[query], weights_LM[query], -1),
    cells=_join(weights_LM, mask_LM),
  )


def _join(weights: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Merges weights [n, n] into the cells of a picture.

  The value of a cell is the sum of the weights over its keys, averaged over its
  queries. Therefore, a row of cells has the same sum as a row of weights. Cells
  without a pair are -1.
  """
  size = masks.cell_size(len(weights))
  starts = np.arange(0, len(weights), size)
  keys = np.diff(starts, append=len(weights))
  sums = masks.pool(weights, size, size) * keys
  return np.where(masks.pool(mask, size, size) > 0, sums, -1)


def draw_heads(
  title: str, heads: Sequence[Head], shape: Sequence[int]
) -> "style.Figure":
  """Draws a column for each head of a layer, for at most 12 heads.

  The upper row shows the weights of one query in the shape of the data. The
  lower row shows the weights of all queries, one row per query.

  Args:
    title: the title of the figure.
    heads: the heads, from `weigh`.
    shape: the shape of the data, rows first.
  """
  heads = heads[: masks.MAX_PANELS]
  n = len(heads[0].weights_L)
  width = math.prod(shape[1:])
  query = masks.shown_query(n)
  size = masks.cell_size(n)
  figure, axes = masks.columns(
    titles=[f"head {i}\n{head.pattern}" for i, head in enumerate(heads)],
    labels=(f"weights of query {query:,},\nby position", masks.ALL_QUERIES),
    above=(
      f"{title}\nwhite: no pair; the darker, the larger,\nrelative to its row"
    ),
  )

  for head, top, bottom in zip(heads, *axes, strict=True):
    # Pad the last row of the data, which may be incomplete.
    weights_L = np.pad(head.weights_L, (0, -n % width), constant_values=-1)
    in_data = weights_L.reshape(-1, width)
    masks.show(top, paint(in_data, in_data.max()), aspect="auto")
    top.plot(
      query % width,
      query // width,
      marker="s",
      ms=7,
      mfc="none",
      mec=style.COLORS[4],
      mew=2,
    )
    largest = head.cells.max(1, keepdims=True)
    masks.show(bottom, paint(head.cells, largest))
    if size > 1:
      bottom.set_xlabel(f"a pixel joins {size} x {size} pairs")

  return figure


def paint(weights: np.ndarray, largest: np.ndarray) -> np.ndarray:
  """Converts weights to colors: larger weights are darker, no pair is white.

  Args:
    weights: weights of any shape; a negative weight means no pair.
    largest: the weight that is darkest; must broadcast to `weights`.

  Returns:
    A uint8 array of RGB colors, with the shape of `weights` and a last axis of
    size 3.
  """
  share = weights.clip(0) / np.maximum(largest, 1e-30)
  pale = style.rgb(style.PALER)
  dark = style.rgb(style.DARK)
  painted = pale + (dark - pale) * share[..., None]
  painted[weights < 0] = style.rgb("#ffffff")
  return painted.round().astype(np.uint8)


def draw(
  model: model_lib.Config,
  params: Any,
  tokens_L: np.ndarray,
  folder: str | os.PathLike,
  **provenance: Any,
) -> Report:
  """Draws the heads of a network on an example, one picture per layer.

  Args:
    model: the config of the network.
    params: its parameters.
    tokens_L: the example, integers [L].
    folder: the folder for the pictures and attention.json.
    **provenance: `step`, `example` and `command`, which are recorded.

  Returns:
    The contents of attention.json: `provenance`, the number of `positions` that
    were used, the measurements of each of the `heads`, and the `pictures`.

  Raises ValueError if the network has documents.
  """
  if model.separator is not None:
    raise ValueError(
      "heads cannot be drawn for a run with data.documents=True; use a run"
      " without documents"
    )

  # Delete the old report first, because it must never be found beside new
  # pictures.
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "attention.json").unlink(missing_ok=True)

  n = min(len(tokens_L), masks.MAX_LENGTH)
  # In a classifier, keys depend on later symbols, so use the whole sequence.
  # In other networks, the first positions suffice.
  used_L = tokens_L if model.classifies else tokens_L[:n]
  collected = {
    layer: (q_BLHK[:, :n], k_BLHK[:, :n])
    for layer, (q_BLHK, k_BLHK) in collect(model, params, used_L).items()
  }

  heads: list[Report] = []
  pictures: list[str] = []
  report = provenance | dict(
    positions=n,
    length=len(tokens_L),
    num_layers=model.num_layers,
    heads=heads,
    pictures=pictures,
  )
  for layer, drawn in weigh(model, params, collected):
    path = folder / f"layer_{layer}.png"
    title = f"layer {layer} of {model.num_layers}, {_title(report)}"
    style.save(draw_heads(title, drawn, model.shape), path)
    pictures.append(str(path))
    for number, head in enumerate(drawn):
      heads.append(
        dict(
          layer=layer,
          head=number,
          pattern=head.pattern,
          pairs=head.pairs,
          entropy=head.entropy,
        )
      )
  atomic.write_json(folder / "attention.json", report)
  return report


def _title(report):
  return (
    "step {step:,}, test example {example},\n"
    "the first {positions:,} of {length:,} positions"
  ).format(**report)


def render(report: Report) -> str:
  """Returns the report as text."""
  rows = [("layer", "head", "pattern", "pairs", "entropy")]
  for head in report["heads"]:
    rows.append(
      (
        str(head["layer"]),
        str(head["head"]),
        head["pattern"],
        f"{head['pairs']:,}",
        f"{head['entropy']:.2f}",
      )
    )

  return (
    f"{_title(report)}\n\n{tables.align(rows, right_from=3)}\n"
    f"{len(report['pictures'])} of {report['num_layers']} layers are drawn,"
    f" with at most {masks.MAX_PANELS} heads each\nentropy: the entropy of a"
    " query's weights in bits, averaged over queries"
  )
