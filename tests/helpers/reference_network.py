"""The network in float64 NumPy, as slow and plain as it can be.

Written from Child et al. 2019 and from what the released code does where the
paper is silent or misprinted, and for what is not in it from the papers that
are named; it shares no code with the library, only the names of its parameters
and settings.
"""

import re

import numpy as np

# How much better a choice must be than the next: far more than what float32
# rounds. A tie would be decided by rounding.
MARGIN = 1e-5


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
  """Su et al. 2021, with pairs as in gpt-oss."""
  half = x.shape[1] // 2
  turns = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half)
  pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * turns)
  return np.concatenate([pairs.real, pairs.imag], axis=1)


def attend(p, x, config, layer, own, document):
  """Section 4.2: heads side by side, then one output matrix."""
  network = config.model
  settings = config.attention
  num_heads = network.num_heads
  group = num_heads // (network.key_heads or num_heads)
  q, k, v = (
    np.split(linear(x, p[name]), num, axis=1)
    for name, num in (
      ("query", num_heads),
      ("key", num_heads // group),
      ("value", num_heads // group),
    )
  )
  k, v = ([each[h // group] for h in range(num_heads)] for each in (k, v))
  if network.positions == "rotary":
    q, k = ([rotate(x, network.rotary_base) for x in xs] for xs in (q, k))
  out = [np.zeros_like(values) for values in v]
  for head in range(num_heads):
    if "(" in settings.pattern:  # an expression, or factors, in turn
      factors = re.split(r",\s*(?![^(]*\))", settings.pattern)
      pattern = factors[layer % len(factors)]
      if "LSH" in pattern or "Routing" in pattern:
        k[head] = unit(q[head])
      of_head = {name: x[head] for name, x in own.items()}
      names = content(q[head], k[head], layer, of_head)
      allowed = eval(pattern.replace(" - ", " & ~"), names)
    else:
      causal = network.task != "classify"
      allowed = mask(settings, layer, head, len(x), causal)
    if network.task != "classify":
      allowed = allowed * (document[:, None] == document)
    for i in range(len(x)):
      keys = np.flatnonzero(allowed[i])
      if len(keys):  # else: nothing
        scores = k[head][keys] @ q[head][i] / np.sqrt(q[head].shape[1])
        weights = np.exp(scores) * allowed[i, keys]
        sink = np.exp(own["sinks"][head]) if network.sinks else 0
        out[head][i] = weights @ v[head][keys] / (weights.sum() + sink)

  return linear(np.concatenate(out, axis=1), p["out"])


def content(q, k, layer, own):
  """Functions that give the masks [n, n] of the patterns in expressions.

  Args:
    q, k: queries and keys [n, K] of a head.
    layer: numbered from 0.
    own: the head's span, and centroids by number of clusters.
  """
  i = np.arange(len(q))[:, None]
  j = np.arange(len(q))[None, :]

  def last(labels, window, past):
    """The last keys with the query's label."""
    same = (labels == labels.T) & past
    return same & (same[:, ::-1].cumsum(1)[:, ::-1] <= window)

  def lsh(window, buckets, rounds):
    """Kitaev et al. 2020, section 2, where a query sees its past only."""
    random = np.random.RandomState([0, layer])
    vectors = random.standard_normal((rounds, buckets // 2, q.shape[1]))
    found = np.zeros((len(q), len(q)), bool)
    for r in np.float32(vectors):
      products = np.concatenate([q @ r.T, -q @ r.T], axis=1)
      found |= last(best(products, 1), window, j < i)
    return found | (i == j) & ~found.any(1, keepdims=True)

  def routing(clusters, window):
    """Roy et al. 2020, where a query sees its past only."""
    cosines = unit(q) @ unit(own[str(clusters)]).T
    return last(best(cosines, 1), window, j <= i)

  def top_blocks(size, num):
    """Lu et al. 2025, section 2.2, without a query's own block."""
    found = np.zeros((len(q), len(q)), bool)
    for t in range(size, len(q)):
      past = t // size
      means = k[: past * size].reshape(past, size, -1).mean(1)
      for block in best((means @ q[t])[None], num)[0]:
        found[t, block * size : (block + 1) * size] = True
    return found

  def span(most, ramp):
    """Sukhbaatar et al. 2019, section 2: weights, not booleans."""
    room = ramp + most * own["spans"] - (i - j)
    return np.clip(room / ramp, 0, 1) * (j <= i)

  return dict(
    AdaptiveSpan=span,
    Local=lambda window, causal=True: (
      (i - j < window) & (j <= i) if causal else abs(i - j) <= window // 2
    ),
    Block=lambda size: (i // size == j // size) & (j <= i),
    Strided=lambda size, offset=0, causal=True: (
      ((i + offset - j) % size == 0) & ((j <= i) | (not causal))
    ),
    Global=lambda size, causal=True: (
      (j < size) & (j <= i) if causal else (j < size) | (i < size)
    ),
    LSH=lsh,
    Routing=routing,
    TopBlocks=top_blocks,
  )


def best(scores, num):
  """Where the largest numbers of each row are, which must not be close."""
  order = np.argsort(-scores, axis=1)
  if num < scores.shape[1]:
    ranked = np.take_along_axis(scores, order, axis=1)
    margin = (ranked[:, num - 1] - ranked[:, num]).min()
    assert margin > MARGIN, f"a tie, within {margin}: take other parameters"
  return order[:, :num]


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def feed_forward(x, p_in, p_out):
  """Section 5.2."""
  h = linear(x, p_in)
  return linear(h / (1 + np.exp(-1.702 * h)), p_out)


def mixture(p, x, num):
  """Fedus et al. 2021, equations 1 and 2, with the `num` best experts."""
  scores = np.exp(x @ p["router"]["kernel"])
  probabilities = scores / scores.sum(1, keepdims=True)
  out = np.zeros_like(x)
  for t, chosen in enumerate(best(probabilities, num)):
    for e in chosen:
      expert = (
        {name: w[e] for name, w in p[part].items()}
        for part in ("experts_in", "experts_out")
      )
      out[t] += probabilities[t, e] * feed_forward(x[t], *expert)

  return out
