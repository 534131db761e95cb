"""The attention of a trained network's heads on a given example."""

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
from sparse_transformer.attention.content import binding, spans as spans_lib
from sparse_transformer.attention.contract import Keys, Queries
from sparse_transformer.figures import masks, style
from sparse_transformer.model import options, transformer

MAX_LAYERS = 8  # that are drawn

Report = dict[str, Any]
# (weights of one query [L], joined weights of all queries [cells, cells]); -1
# for pairs outside the pattern.
Weights = tuple[np.ndarray, np.ndarray]
Head = tuple[Report, Weights]  # what is measured, and what is drawn
Collected = dict[int, tuple[jax.Array, jax.Array]]  # {layer: (q_BLHK, k_BLHK)}


def collect(
  model: model_lib.Config, params: Any, tokens_L: np.ndarray
) -> Collected:
  """The queries and keys of at most `MAX_LAYERS` layers, in one pass."""
  drawn = min(MAX_LAYERS, model.num_layers)
  chosen = np.linspace(0, model.num_layers - 1, drawn).round().astype(int)
  places = np.full(model.num_layers, drawn)  # that is dropped
  places[chosen] = np.arange(drawn)
  shape = 1, len(tokens_L), model.num_heads, model.head_width

  @jax.jit
  def run(params, tokens_BL):
    network = transformer.bind(model, params)

    def attend(kept, layer, index, q_BLHK, k_BLGK, v, **keywords):
      place = jnp.asarray(places)[layer + model_lib.period(model) * index]
      group = q_BLHK.shape[2] // k_BLGK.shape[2]
      k_BLHK = jnp.repeat(k_BLGK, group, axis=2)
      both = jnp.stack([q_BLHK, k_BLHK])
      kept = kept.at[place].set(both, mode="drop")
      return network.attend(kept, layer, index, q_BLHK, k_BLGK, v, **keywords)

    empty = jnp.zeros((drawn, 2, *shape), model.dtype)
    return network.run_blocks(network.embed(tokens_BL), attend, empty)[1]

  kept = run(params, tokens_L[None])
  return {int(layer): tuple(kept[i]) for i, layer in enumerate(chosen)}


def weigh(
  model: model_lib.Config,
  params: Any,
  collected: Collected,
  temperature: float = 1.0,
) -> Iterator[tuple[int, list[Head]]]:
  """Yields (layer, its heads) for each layer that `collect` returns."""
  own = options.own(model, params)
  for layer, (q_BLHK, k_BLHK) in collected.items():
    patterns = model.patterns[layer]
    own_of_layer = jax.tree.map(lambda x, layer=layer: x[layer], own)
    inputs = options.prepare(
      model,
      options.Layer(patterns, 0, own_of_layer),
      options.Inputs(q_BLHK, k_BLHK, k_BLHK, {}),
    )
    directions = inputs.keywords.get("directions", {})
    # Values do not matter for weights: keys stand in for them.
    mask_BHLM = binding.realize(
      patterns, Queries(q_BLHK), Keys(k_BLHK, k_BLHK), directions
    )
    at = np.arange(q_BLHK.shape[1])
    ramps_HLM = spans_lib.weights(patterns, directions, at[:, None], at)
    sinks_H = inputs.keywords.get("sinks_H")
    scale = temperature * math.sqrt(q_BLHK.shape[-1])

    heads = []
    for head, pattern in enumerate(patterns):
      q_LK = np.asarray(q_BLHK[0, :, head], np.float32) / scale
      k_MK = np.asarray(k_BLHK[0, :, head], np.float32)
      scores_LM = q_LK @ k_MK.T
      if ramps_HLM is not None:
        scores_LM = scores_LM + jnp.log(ramps_HLM[head])
      sink = -np.inf if sinks_H is None else sinks_H[head] / temperature
      mask_LM = np.asarray(mask_BHLM[0, head])
      heads.append(_weigh(pattern, scores_LM, mask_LM, sink))
    yield layer, heads


def _weigh(pattern, scores_LM, mask_LM, sink):
  # The sink is one more key.
  more = (0, 0), (0, 1)
  scores = jnp.pad(scores_LM, more, constant_values=sink)
  where = np.pad(mask_LM, more, constant_values=sink > -np.inf)
  weights = np.asarray(jax.nn.softmax(scores, where=where))
  weights_LM = weights[:, :-1]

  entropy_L = entr(weights).sum(1) / math.log(2)  # bits
  has_keys = mask_LM.any(1)
  measured = dict(
    pattern=str(pattern),
    pairs=int(mask_LM.sum()),
    entropy=float(entropy_L[has_keys].mean()) if has_keys.any() else 0.0,
  )
  shown = np.where(mask_LM, weights_LM, -1)[masks.shown_query(len(mask_LM))]
  return measured, (shown, _join(weights_LM, mask_LM))


def _join(weights: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Cells of [n, n]: means over queries of sums over keys; -1 for no pairs."""
  size = masks.cell_size(len(weights))
  starts = np.arange(0, len(weights), size)
  keys = np.diff(starts, append=len(weights))
  shares, has_pairs = (masks.pool(x, size, size) for x in (weights, mask))
  return np.where(has_pairs > 0, shares * keys, -1)


def draw_heads(
  title: str,
  titles: Sequence[str],
  heads: Sequence[Weights],
  shape: Sequence[int],
) -> "style.Figure":
  """A figure with a column for each head of a layer, at most the first 12.

  Above are the weights of one query, in the `shape` of the data, rows first;
  below, the weights of all queries, one per row.
  """
  titles, heads = titles[: masks.MAX_PANELS], heads[: masks.MAX_PANELS]
  n, width = len(heads[0][0]), math.prod(shape[1:])
  query, size = masks.shown_query(n), masks.cell_size(n)
  legend = "white: no pair; the darker, the larger,\nrelative to its row"
  labels = f"weights of query {query:,},\nby position", masks.ALL_QUERIES
  figure, axes = masks.columns(titles, labels, f"{title}\n{legend}")
  mark = dict(marker="s", ms=7, mfc="none", mec=style.COLORS[4], mew=2)
  for (top, bottom), (of_query, of_all) in zip(axes.T, heads, strict=True):
    of_query = np.pad(of_query, (0, -n % width), constant_values=-1)
    cells = of_query.reshape(-1, width)
    masks.show(top, paint(cells, cells.max()), aspect="auto")
    top.plot(query % width, query // width, **mark)
    masks.show(bottom, paint(of_all, of_all.max(1, keepdims=True)))
    if size > 1:
      bottom.set_xlabel(f"a pixel joins {size} x {size} pairs")
  return figure


def paint(weights: np.ndarray, largest: np.ndarray) -> np.ndarray:
  """RGB image of weights, relative to `largest`, which broadcasts."""
  share = (weights.clip(0) / np.maximum(largest, 1e-30))[..., None]
  nothing, pale, dark = map(style.rgb, ("#ffffff", style.PALER, style.DARK))
  painted = pale + (dark - pale) * share
  painted = np.where(weights[..., None] < 0, nothing, painted)
  return painted.round().astype(np.uint8)


def draw(
  model: model_lib.Config,
  params: Any,
  tokens_L: np.ndarray,
  folder: str | os.PathLike,
  about: Report,
) -> Report:
  """Draws the heads of a network on an example, one picture for each layer.

  Args:
    model, params: the network.
    tokens_L: the example, integers.
    folder: for the pictures, and attention.json.
    about: `step`, `example`, `command`; `temperature`, which divides scores.

  Returns:
    What is in attention.json: `about`, the number of `positions` that were
    used, what was measured of each of the `heads`, and the `pictures`.
  """
  if model.separator is not None:
    raise ValueError(
      "what heads attend to cannot be drawn for a run with data.documents"
    )
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "attention.json").unlink(missing_ok=True)  # of pictures before
  n, total = min(len(tokens_L), masks.MAX_LENGTH), len(tokens_L)
  # A classifier's keys depend on later symbols.
  used_L = tokens_L if model.classifies else tokens_L[:n]
  collected = {
    layer: (q_BLHK[:, :n], k_BLHK[:, :n])
    for layer, (q_BLHK, k_BLHK) in collect(model, params, used_L).items()
  }
  report = about | dict(positions=n, length=total, num_layers=model.num_layers)
  report |= dict(heads=[], pictures=[])
  for layer, heads in weigh(model, params, collected, about["temperature"]):
    path = folder / f"layer_{layer}.png"
    figure = draw_heads(
      f"layer {layer} of {model.num_layers}, {_about(report)}",
      [f"head {i}\n{head['pattern']}" for i, (head, _) in enumerate(heads)],
      [weights for _, weights in heads],
      model.shape,
    )
    style.save(figure, path)
    report["pictures"].append(str(path))
    report["heads"] += [
      dict(layer=layer, head=i) | x for i, (x, _) in enumerate(heads)
    ]
  atomic.write_json(folder / "attention.json", report)
  return report


def _about(report):
  text = (
    "step {step:,}, test example {example},\ntemperature {temperature:g}\n"
    "the first {positions:,} of {length:,} positions"
  )
  return text.format(**report)


def render(report: Report) -> str:
  """The report as text."""
  rows = [("layer", "head", "pattern", "pairs", "entropy")]
  rows += [
    (f"{x['layer']}", f"{x['head']}", x["pattern"], f"{x['pairs']:,}")
    + (f"{x['entropy']:.2f}",)
    for x in report["heads"]
  ]
  return (
    f"{_about(report)}\n\n{tables.align(rows, right_from=3)}\n"
    f"{len(report['pictures'])} of {report['num_layers']} layers are drawn, at"
    f" most {masks.MAX_PANELS} heads of each\nentropy: of a query's weights, in"
    " bits, at this temperature; the mean over queries"
  )
