"""Files like those that Jun et al. 2020 released, with random weights."""

import math

import numpy as np


def arrays(
  layers=4, width=16, half=True, shape=(8, 8, 3), starts=(), vocab=256
):
  """{name: array} of all that their code saves."""
  inner, mlp = (width // 2, 2 * width) if half else (width, 4 * width)
  shapes = {
    "we": (vocab, width),
    "gen_logits/logits_proj": (width, vocab),
  }
  shapes |= {f"pos_emb_{i}": (n, width) for i, n in enumerate(shape)}
  shapes |= {f"sos_token/{name}": (rows, width) for name, rows in starts}
  shapes |= {} if starts else {"sos_token/sos": (1, 1, width)}
  outputs = dict(
    q_proj=inner,
    k_proj=inner,
    v_proj=width,
    post_proj=width,
    mlp_proj1=mlp,
    mlp_proj2=width,
  )
  norms = ["final_norm"]
  for i in range(layers):
    for name, n in outputs.items():
      inputs = mlp if name == "mlp_proj2" else width
      shapes |= {f"h{i}/{name}/w": (inputs, n), f"h{i}/{name}/b": (n,)}
    norms += f"h{i}/attn_input", f"h{i}/mlp"

  shapes |= {f"{name}/{x}": (width,) for name in norms for x in "gb"}
  numbers = "global_step", "num_epochs", "num_examples_processed"
  rates = (
    "curr_loss_scale",
    "best_val_loss",
    "adam_beta/beta1_power",
    "adam_beta/beta2_power",
  )
  found = {f"{name}:0": np.int64(12_345) for name in numbers}
  found |= {f"{name}:0": np.float32(1.9375) for name in rates}
  found["Entropy:0"] = np.full(245_760, np.nan, np.float32)
  draw = np.random.default_rng(0).standard_normal
  for name, size in shapes.items():
    moments = np.float16 if math.prod(size) >= 8192 else np.float32
    for kind in ("", "/Ema/ema"):
      x = draw(size, np.float32) / math.sqrt(size[0])
      found[f"model/{name}{kind}:0"] = x + name.endswith("/g")
    for kind in ("Adam", "Adam_1"):
      found[f"model/{name}/{kind}:0"] = np.zeros(size, moments)

  return found
