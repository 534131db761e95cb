"""The network in float64 NumPy, as slow and plain as it can be.

Written from Child et al. 2019 and from what the released code does where the
paper is silent or misprinted; it shares no code with the library, only the
names of its parameters and settings.
"""

import numpy as np


def mask(attention, layer, head, n):
  """Booleans [n, n]: whether query i attends to key j, in section 4.3.

  Args:
    attention: the group `attention` of a config.
    layer, head: numbered from 0.
    n: positions in a sequence.
  """
  stride, width = attention.stride, attention.width
  i, j = np.arange(n)[:, None], np.arange(n)[None, :]
  # In mode "heads", every second head has a summary.
  if attention.mode == "heads":
    sub_block = (head // 2) % attention.num_summaries
  else:
    sub_block = head % attention.num_summaries
  # Sub-blocks are counted from the end of a block.
  end = stride - width * sub_block
  factors = {
    "dense": [i >= j],
    # Released code: the last positions, with the query itself. The paper's
    # formula has one more.
    "local": [i - j < attention.window],
    "strided": [i - j < attention.window, (i - j) % stride == 0],
    "fixed": [
      i // stride == j // stride,
      (end - width <= j % stride) & (j % stride < end),
    ],
  }[attention.pattern]
  if attention.mode == "merged":
    chosen = sum(factors) > 0
  elif attention.mode == "heads":
    chosen = factors[head % len(factors)]
  elif len(factors) == 1:
    chosen = factors[0]
  else:
    cycle = attention.cycle or range(len(factors))
    chosen = factors[cycle[layer % len(cycle)]]
  return chosen & (j <= i)


def logits(config, shape, params, tokens):
  """Logits [n, V] of one sequence, those of position t from tokens before t.

  Args:
    config: an experiment's config.
    shape: sizes of the axes of positions, the last of which varies fastest.
    params: nested dicts of arrays.
    tokens: integers [n].
  """
  x = embed(params, shape, tokens)
  for layer in range(config.model.num_layers):
    p = {
      part: {name: np.float64(w[layer]) for name, w in weights.items()}
      for part, weights in params["blocks"].items()
    }
    masks = [
      mask(config.attention, layer, head, len(tokens))
      for head in range(config.model.num_heads)
    ]
    a = attend(p, norm(x, p["attention_norm"], 1e-5), masks)
    b = feed_forward(p, norm(x + a, p["mlp_norm"], 1e-5))
    x = x + (a + b)
  return norm(x, params["norm"], 1e-6) @ np.float64(params["logits"]["kernel"])


def bits(logits, tokens):
  """Mean of -log2 p(token)."""
  rest = logits - logits.max(1, keepdims=True)
  log_p = rest - np.log(np.exp(rest).sum(1, keepdims=True))
  return -np.mean([log_p[t, v] for t, v in enumerate(tokens)]) / np.log(2)


def embed(params, shape, tokens):
  """The start vector, then every symbol but the last with its own position."""
  rows = [np.float64(params["start"])]
  for t, token in enumerate(tokens[:-1]):
    row = np.float64(params["token"]["embedding"][token])
    step = 1  # positions until a coordinate on this axis changes
    for axis in reversed(range(len(shape))):
      table = params["position"][axis]["embedding"]
      row = row + np.float64(table[t // step % shape[axis]])
      step *= shape[axis]
    rows.append(row)
  return np.stack(rows)


def norm(x, p, epsilon):
  centered = x - x.mean(1, keepdims=True)
  variance = (centered**2).mean(1, keepdims=True)
  scaled = centered / np.sqrt(variance + epsilon)
  return scaled * np.float64(p["scale"]) + np.float64(p["bias"])


def linear(x, p):
  return x @ p["kernel"] + p["bias"]


def attend(p, x, masks):
  """Section 4.2: heads side by side, then one output matrix."""
  q, k, v = (
    np.split(linear(x, p[name]), len(masks), axis=1)
    for name in ("query", "key", "value")
  )
  out = [np.zeros_like(values) for values in v]
  for head, allowed in enumerate(masks):
    for i in range(len(x)):
      keys = np.flatnonzero(allowed[i])
      if len(keys):  # else: nothing
        scores = k[head][keys] @ q[head][i] / np.sqrt(q[head].shape[1])
        weights = np.exp(scores - scores.max())
        out[head][i] = weights @ v[head][keys] / weights.sum()
  return linear(np.concatenate(out, axis=1), p["out"])


def feed_forward(p, x):
  """Section 5.2."""
  h = linear(x, p["mlp_in"])
  return linear(h / (1 + np.exp(-1.702 * h)), p["mlp_out"])
