"""What is kept between calls: plans, tables and layouts of patterns."""

import sys

ROOMS = "sparse_transformer.attention", "sparse_transformer.patterns"


def clear_caches() -> None:
  """Forgets the plans of all patterns and lengths, which take memory.

  They are made again when they are needed. Programs that JAX has compiled have
  copies of them: see `jax.clear_caches`.
  """
  for name, module in list(sys.modules.items()):
    if name.startswith(ROOMS):
      for x in vars(module).values():
        if hasattr(x, "cache_clear"):
          x.cache_clear()
