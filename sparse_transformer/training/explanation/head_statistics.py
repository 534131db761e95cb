"""The attention of a trained network's heads on a given example.

One pass of the network collects queries and keys. Then the pairs of each head,
static or bound to these queries and keys, are weighted.
"""

import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer import atomic, model as model_lib, tables
from sparse_transformer.attention.content import binding, spans as spans_lib
from sparse_transformer.attention.contract import Keys, Queries
from sparse_transformer.figures import head_maps as pictures, masks, style
from sparse_transformer.model import options, transformer

MAX_LAYERS = 8  # that are drawn

Report = dict[str, Any]
Head = tuple[Report, pictures.Weights]  # what is measured, and what is drawn
# {layer: (q_BLHK, k_BLHK)}
Collected = dict[int, tuple[jax.Array, jax.Array]]


def collect(
  model: model_lib.Config, params: Any, tokens_L: np.ndarray
) -> Collected:
  """The queries and keys of layers, at most `MAX_LAYERS` of them.

  The network must have a position for each of the symbols.
  """
  drawn = min(MAX_LAYERS, model.num_layers)
  chosen = np.linspace(0, model.num_layers - 1, drawn).round().astype(int)
  places = np.full(model.num_layers, drawn)  # that is dropped
  places[chosen] = np.arange(drawn)
  shape = 1, len(tokens_L), model.num_heads, model.head_width

  @jax.jit
  def run(params, tokens_BL):
    network = transformer.bind(model, params)

    def attend(found, layer, index, q_BLHK, k_BLGK, v, **keywords):
      place = jnp.asarray(places)[layer + model_lib.period(model) * index]
      k_BLHK = jnp.repeat(k_BLGK, q_BLHK.shape[2] // k_BLGK.shape[2], 2)
      both = jnp.stack([q_BLHK, k_BLHK])
      found = found.at[place].set(both, mode="drop")
      inputs = q_BLHK, k_BLGK, v
      return network.attend(found, layer, index, *inputs, **keywords)

    empty = jnp.zeros((drawn, 2, *shape), model.dtype)
    return network.run_blocks(network.embed(tokens_BL), attend, empty)[1]

  found = run(params, tokens_L[None])
  return {int(layer): tuple(found[i]) for i, layer in enumerate(chosen)}


def weigh(
  model: model_lib.Config,
  params: Any,
  collected: Collected,
  temperature: float = 1.0,
) -> Iterator[tuple[int, list[Head]]]:
  """Yields (layer, its heads) for each layer that `collect` returns.

  The temperature divides the scores before their softmax.
  """
  own = options.own(model, params)
  for layer, (q_BLHK, k_BLHK) in collected.items():
    patterns = model.patterns[layer]
    own_of_layer = jax.tree.map(lambda x, layer=layer: x[layer], own)
    where = options.Layer(patterns, 0, own_of_layer)
    inputs = options.Inputs(q_BLHK, k_BLHK, k_BLHK, {})
    inputs = options.prepare(model, where, inputs)
    directions = inputs.keywords.get("directions", {})
    arrays = Queries(q_BLHK), Keys(k_BLHK, k_BLHK)
    mask_BHLM = binding.realize(patterns, *arrays, directions)
    i = np.arange(q_BLHK.shape[1])
    ramps_HLM = spans_lib.weights(patterns, directions, i[:, None], i)
    ramps = [1.0] * len(patterns) if ramps_HLM is None else ramps_HLM
    scale = temperature * math.sqrt(q_BLHK.shape[-1])
    q_HLK, k_HLK = (
      np.asarray(x[0], np.float32).swapaxes(0, 1) for x in (q_BLHK, k_BLHK)
    )
    heads = map(_weigh, patterns, q_HLK / scale, k_HLK, mask_BHLM[0], ramps)
    yield layer, list(heads)


def _weigh(pattern, q_LK, k_LK, mask_LM, ramp_LM):
  """The attention of a head; `ramp_LM` is what its span multiplies weights by.

  The entropy, in bits, is a mean over the queries that have keys.
  """
  mask_LM = np.asarray(mask_LM)
  weights_LM = jax.nn.softmax(q_LK @ k_LK.T, where=mask_LM) * ramp_LM
  sums_L1 = weights_LM.sum(1, keepdims=True)
  weights_LM = np.asarray(weights_LM / jnp.where(sums_L1 > 0, sums_L1, 1))
  bits = jax.scipy.special.entr(weights_LM).sum(1) / math.log(2)
  keys, shown = mask_LM.sum(1), masks.shown_query(len(mask_LM))
  measured = dict(
    pattern=str(pattern),
    pairs=int(keys.sum()),
    keys_mean=int(keys.sum()) / len(keys),
    keys_max=int(keys.max()),
    entropy=float(bits[keys > 0].mean()) if keys.any() else 0.0,
  )
  of_query = np.where(mask_LM, weights_LM, -1)[shown]
  return measured, (of_query, pictures.join(weights_LM, mask_LM))


def draw(
  model: model_lib.Config,
  params: Any,
  tokens_L: np.ndarray,
  folder: str | os.PathLike,
  about: Report,
) -> Report:
  """Draws the heads of a network on an example, see `weigh`.

  Into the folder go the pictures, one for each layer, and attention.json.

  Args:
    model, params: the network.
    tokens_L: the example, integers.
    folder: for the files.
    about: `step`, `example` and `temperature`; the first two are only reported.

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
  total = len(tokens_L)
  n = min(total, masks.MAX_LENGTH)
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
    figure = pictures.panels(
      f"layer {layer} of {model.num_layers}, {_about(report)}",
      [f"head {i}: {head['pattern']}" for i, (head, _) in enumerate(heads)],
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
  step, n, total = (report[x] for x in ("step", "positions", "length"))
  text = f"step {step:,}, test example {report['example']},\n"
  text += f"temperature {report['temperature']:g}"
  if n < total:
    text += f"\nthe first {n:,} of {total:,} positions"
  return text


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
  cells, heads = COLUMNS.values(), report["heads"]
  rows = [[cell.format(**head) for cell in cells] for head in heads]
  table = tables.align([list(COLUMNS), *rows], right_from=3)
  drawn = f"{len(report['pictures'])} of {report['num_layers']} layers"
  return (
    f"{_about(report)}\n\n{table}\n{drawn} are drawn, at most"
    f" {masks.MAX_PANELS} heads of each\nentropy: of a query's weights, in"
    " bits, at this temperature; the mean over queries"
  )
