"""The network in float64 NumPy, as slow and plain as it can be.

Written from Child et al. 2019 and from what the released code does where the
paper is silent or misprinted, and for what is not in it from the papers that
are named; it shares no code with the library, only the names of its parameters
and settings. Attention, given its pairs, is that of reference_attention.py, and
pairs that follow the content those of content.py.
"""

import re

import numpy as np
from helpers import content, reference_attention


def mask(attention, layer, head, n, causal=True):
  """Booleans [n, n]: whether query i attends to key j, in section 4.3.

  Args:
    attention: the group `attention` of a config.
    layer, head: numbered from 0.
    n: positions in a sequence.
    causal: whether queries see no later keys.
  """
  stride = attention.stride
  width = attention.width
  i = np.arange(n)[:, None]
  j = np.arange(n)[None, :]
  # In mode "heads", every second head has a summary.
  if attention.mode == "heads":
    sub_block = (head // 2) % attention.num_summaries
  else:
    sub_block = head % attention.num_summaries

  # Sub-blocks are counted from the end of a block.
  end = stride - width * sub_block
  # Released code: the last positions, with the query itself. The paper's
  # formula has one more.
  window = i - j < attention.window
  if not causal:
    window = abs(i - j) <= attention.window // 2
  factors = {
    "dense": [np.ones((n, n), bool)],
    "local": [window],
    "gpt_oss": [i - j < 128, np.ones((n, n), bool)],
    "strided": [window, (i - j) % stride == 0],
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

  return chosen & ((j <= i) | (not causal))


def logits(config, shape, params, tokens, separator=None):
  """Logits [n, V] of one sequence, those of position t from tokens before t.

  Of a classifier: [1, C], from all tokens, without padding.

  Args:
    config: an experiment's config.
    shape: sizes of the axes of positions; the last axis varies fastest.
    params: nested dicts of arrays.
    tokens: integers [n].
    separator: the symbol that ends a document.
  """
  x = embed(params, shape, tokens, config.model.task == "classify")
  of_kind = {
    "blocks": 0,
    "expert_blocks": 0,
  }  # blocks so far
  for layer in range(config.model.num_layers):
    kind = "blocks"
    if config.model.experts and layer % 2:
      kind = "expert_blocks"
    p = {
      part: {name: np.float64(w[of_kind[kind]]) for name, w in weights.items()}
      for part, weights in params[kind].items()
    }
    of_kind[kind] += 1
    options = {
      "spans": params.get("spans"),
      "sinks": params.get("sinks"),
    }
    options |= params.get("centroids", {})
    options = {x: c[layer] for x, c in options.items() if c is not None}
    own = {name: np.float64(x) for name, x in options.items()}
    y = norm(x, p["attention_norm"], 1e-5)
    a = attend(p, y, config, layer, own, documents(tokens, separator))
    y = norm(x + a, p["mlp_norm"], 1e-5)
    if kind == "blocks":
      b = feed_forward(y, p["mlp_in"], p["mlp_out"])
    else:
      b = mixture(p, y, num=2)
    x = x + (a + b)

  x = norm(x, params["norm"], 1e-6)
  if config.model.task == "classify":
    x = x.mean(0, keepdims=True)
  return x @ np.float64(params["logits"]["kernel"])


def bits(logits, tokens):
  """Mean of -log2 p(token)."""
  rest = logits - logits.max(1, keepdims=True)
  log_p = rest - np.log(np.exp(rest).sum(1, keepdims=True))
  return -np.mean([log_p[t, v] for t, v in enumerate(tokens)]) / np.log(2)


def embed(params, shape, tokens, is_classifier=False):
  """The start vector, then every symbol but the last with its own position.

  A classifier has every symbol, and no start vector.
  """
  rows = [np.float64(params["start"])] if "start" in params else []
  for t, token in enumerate(tokens if is_classifier else tokens[:-1]):
    row = np.float64(params["token"]["embedding"][token])
    step = 1  # positions until a coordinate on this axis changes
    for axis in reversed(range(len(params.get("position", ())))):
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


def documents(tokens, separator):
  """The number of the document that each position is in."""
  ends = np.array([token == separator for token in tokens[:-1]])
  return np.append(0, np.cumsum(ends))


def rotate(x, base):
  """Su et al. 2021, with pairs as in gpt-oss; x is [n, heads, K]."""
  half = x.shape[-1] // 2
  turns = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half)
  pairs = x[..., :half] + 1j * x[..., half:]
  pairs = pairs * np.exp(1j * turns)[:, None]
  return np.concatenate([pairs.real, pairs.imag], axis=-1)


def attend(p, x, config, layer, own, document):
  """Section 4.2: heads side by side, then one output matrix."""
  n = len(x)
  network = config.model
  num_heads = network.num_heads
  num_key_heads = network.key_heads or num_heads
  q = linear(x, p["query"]).reshape(n, num_heads, -1)
  k = linear(x, p["key"]).reshape(n, num_key_heads, -1)
  v = linear(x, p["value"]).reshape(n, num_key_heads, -1)
  k = np.repeat(k, num_heads // num_key_heads, axis=1)
  if network.positions == "rotary":
    q = rotate(q, network.rotary_base)
    k = rotate(k, network.rotary_base)

  weights = []
  for head in range(num_heads):
    if "(" in config.attention.pattern:  # an expression, or factors, in turn
      factors = re.split(r",\s*(?![^(]*\))", config.attention.pattern)
      pattern = factors[layer % len(factors)]
      if "LSH" in pattern or "Routing" in pattern:
        k[:, head] = content.unit(q[:, head])
      of_head = {name: x[head] for name, x in own.items()}
      names = expressions(q[:, head], k[:, head], layer, of_head)
      allowed = eval(pattern.replace(" - ", " & ~"), names)
    else:
      causal = network.task != "classify"
      allowed = mask(config.attention, layer, head, n, causal)
    if network.task != "classify":
      allowed = allowed * (document[:, None] == document)
    if network.max_span:  # Sukhbaatar et al. 2019, section 2
      positions = np.arange(n)
      distance = abs(positions[:, None] - positions)
      room = 32 + network.max_span * own["spans"][head] - distance
      allowed = allowed * np.clip(room / 32, 0, 1)
    weights.append(allowed)

  out, _ = reference_attention.outputs(
    q[None],
    k[None],
    v[None],
    weights=np.stack(weights),
    sinks=own.get("sinks"),
  )
  return linear(out.reshape(n, -1), p["out"])


def expressions(q, k, layer, own):
  """Functions that give the masks [n, n] of the patterns in expressions.

  Args:
    q, k: queries and keys [n, K] of a head.
    layer: numbered from 0.
    own: centroids by number of clusters.
  """
  i = np.arange(len(q))[:, None]
  j = np.arange(len(q))[None, :]

  def local(window, causal=True):
    if causal:
      return (i - j < window) & (j <= i)
    return abs(i - j) <= window // 2

  def strided(stride, offset=0, causal=True):
    column = (i + offset - j) % stride == 0
    return column & ((j <= i) | (not causal))

  def first(size, causal=True):
    if causal:
      return (j < size) & (j <= i)
    return (j < size) | (i < size)

  def lsh(window, buckets, rounds):
    random = np.random.RandomState([0, layer])
    shape = rounds, buckets // 2, q.shape[1]
    vectors = np.float32(random.standard_normal(shape))
    return content.lsh(q, vectors, window)

  return {
    "Block": lambda size: (i // size == j // size) & (j <= i),
    "Global": first,
    "LSH": lsh,
    "Local": local,
    "Routing": lambda clusters, window: content.routing(
      q, own[str(clusters)], window
    ),
    "Strided": strided,
    "TopBlocks": lambda size, num: content.top_blocks(q, k, size, num),
  }


def feed_forward(x, p_in, p_out):
  """Section 5.2."""
  h = linear(x, p_in)
  return linear(h / (1 + np.exp(-1.702 * h)), p_out)


def mixture(p, x, num):
  """Fedus et al. 2021, equations 1 and 2, with the `num` best experts."""
  scores = np.exp(x @ p["router"]["kernel"])
  probabilities = scores / scores.sum(1, keepdims=True)
  out = np.zeros_like(x)
  for t, chosen in enumerate(content.best(probabilities, num)):
    for e in chosen:
      expert = (
        {name: w[e] for name, w in p[part].items()}
        for part in ("experts_in", "experts_out")
      )
      out[t] += probabilities[t, e] * feed_forward(x[t], *expert)

  return out
