"""Measures sampling with a pattern's cache, with a full cache and without one.

  python -m benchmarks.sampling [--rounds=N] [--out=F]

n = 12,288, 4 layers of 8 heads of 64, batch 1, float32: medians of steps near
positions 1,000 and 12,000, interleaved. The full cache belongs to dense
attention, which keeps and reads all keys. Without a cache, each symbol takes a
pass over the entire sequence.
"""

import itertools
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import record, timing
from configs import stdlib
from sparse_transformer import model as model_lib
from sparse_transformer.attention import decoding
from sparse_transformer.comparison import plan
from sparse_transformer.model import kv_cache
from sparse_transformer.training.experiment import Experiment

LENGTH, LAYERS, HEADS, WIDTH = 12_288, 4, 8, 512
STEPS = 64  # per measurement
PLACES = 1_000, 12_000
CASES = {
  "strided": ("Local(128), Strided(128)", "interleaved"),
  "fixed merged": ("Block(128), Summary(128, 32)", "merged"),
  "full cache": ("Causal()", "interleaved"),
}


def prepare_network(expression, mode):
  """The config and the initial parameters of a network with a pattern."""
  values = {
    "data.length": LENGTH,
    "model.num_layers": LAYERS,
    "model.num_heads": HEADS,
    "model.width": WIDTH,
    "model.dropout": 0.0,
    "attention.pattern": expression,
    "attention.mode": mode,
    "attention.cycle": (),
  }
  config = plan.with_values(stdlib.get_config(), **values)
  model = Experiment(config).model
  return model, jax.jit(lambda: model_lib.init_params(model, 0))()


def prepare(config, params):
  """(facts about the cache, {position: function that runs STEPS steps})."""
  decoder = kv_cache.Decoder(config)

  def steps(params, state, first):
    def step(state, t):
      logits, state = decoder.step(params, state, jnp.zeros(1, int), t)
      return state, logits.argmax(-1)

    return lax.scan(step, state, first + jnp.arange(STEPS))

  run = jax.jit(steps, donate_argnums=1)
  state = [jax.jit(lambda: decoder.init(1))()]

  def at(place):
    def call():
      state[0], symbols = run(params, state[0], np.int32(place))
      jax.block_until_ready(symbols)

    return call

  used = dict.fromkeys(itertools.chain(*config.patterns))
  plans = {pattern: decoding.make_plan(pattern, LENGTH) for pattern in used}
  about = dict(
    cache_bytes=decoder.num_bytes(1),
    keys={str(p): (x.size, x.width) for p, x in plans.items()},
  )
  return about, {place: at(place) for place in PLACES}


def prepare_recompute(config, params):
  """A function that computes a symbol by a pass over the entire sequence."""
  apply = jax.jit(model_lib.make_apply(config))
  tokens = jnp.zeros((1, LENGTH), jnp.uint8)
  return lambda: jax.block_until_ready(apply(params, tokens))


def measure(rounds: int) -> dict:
  results, calls = {}, {}
  for name, case in CASES.items():
    network = prepare_network(*case)
    results[name], at = prepare(*network)
    calls |= {(name, place): call for place, call in at.items()}
    if name != "full cache":
      calls[name, "no cache"] = prepare_recompute(*network)
  for (name, place), seconds in timing.seconds(calls, rounds).items():
    symbols = STEPS if place in PLACES else 1
    median = statistics.median(seconds) / symbols
    results[name][f"seconds at {place}"] = median
  return dict(cases=results)


@record.as_table
def table(found):
  titles = "pattern", "cache", "symbols/s at position 12,000"
  yield *titles, "speed-up over `Causal()`", "over no cache"
  dense = found["cases"]["full cache"]["seconds at 12000"]
  for case in found["cases"].values():
    seconds = case["seconds at 12000"]
    without = case.get("seconds at no cache")
    yield (
      f"`{', '.join(case['keys'])}`",
      f"{case['cache_bytes'] / 2**20:.0f} MiB",
      f"{1 / seconds:.0f}",
      f"{dense / seconds:.1f}",
      f"{without / seconds:.0f}" if without else "",
    )


def main() -> None:
  flags = record.parser(__doc__)
  flags.add_argument("--rounds", type=int, default=7)
  args = flags.parse_args()
  found = record.about("python -m benchmarks.sampling", sys.argv[1:])
  found |= measure(args.rounds)
  record.write(args.out or record.path("sampling"), found)
  print(table(found))


if __name__ == "__main__":
  main()
