"""The process that runs the JAX programs: our attention and that of jax.nn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import worker
from benchmarks.accelerator import backends
from sparse_transformer.attention import attend, describe


def ours(entry):
  """Returns our attention, with the backend that `auto` chooses."""
  pattern, n = worker.pattern_of(entry), entry.n
  request = backends.request_for(
    (pattern,) * entry.heads,
    n,
    batch=entry.batch,
    width=entry.width,
    dtype=entry.dtype,
  )
  (description,) = describe(request)
  options = {}
  if entry.documents:
    options["segments_BL"] = jnp.asarray(worker.segments(entry))[None]
  return _compile(
    entry,
    functools.partial(attend, patterns=pattern, **options),
    backend=description.backends[0],
    computed_per_pair=description.computed / pattern.pairs(n),
  )


def jax_nn(entry):
  """Returns the attention of jax.nn.

  It uses an n x n mask unless the pattern is plain causal attention.
  """
  options = dict(is_causal=True)
  if entry.pattern != "Causal()" or entry.documents:
    pattern, rows = worker.pattern_of(entry), np.arange(entry.n)
    options = dict(mask=worker.mask_of(entry, pattern, rows)[None, None])
  attention = functools.partial(
    jax.nn.dot_product_attention, implementation="xla", **options
  )
  return _compile(entry, attention)


def _compile(entry, attention, **facts):
  inputs = [jnp.asarray(x, entry.dtype) for x in worker.random_inputs(entry)]
  passes = {}
  for name, run in backends.passes(attention).items():
    run = run.lower(*inputs).compile()
    passes[name] = lambda run=run: jax.block_until_ready(run(*inputs))
  facts["temp_bytes"] = run.memory_analysis().temp_size_in_bytes
  first = lambda x: np.asarray(x[0], np.float64)
  return worker.Contestant(passes, first, facts=facts)


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")  # others: make accelerator
  worker.Worker((ours, jax_nn), ("jax", "numpy")).serve()
