"""Settings of the whole suite."""

import jax

# Silent broadcasting over a missing axis is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")
