"""The network position by position, with the key-value cache of its patterns.

`attention.decoding` says which keys are kept, and which of them a step reads.
"""

import dataclasses

import jax

from sparse_transformer import attention
from sparse_transformer.model import stacks, transformer
from sparse_transformer.model.hyperparameters import Config

Caches = dict[int, attention.Cache]  # of each stack, by its first layer


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A `sampling.Decoder` that predicts position by position with a cache."""

  config: Config

  def init(self, batch: int) -> Caches:
    """Makes the empty caches."""
    config = self.config
    if config.separator is not None:
      raise ValueError(
        "the cache holds one document: sample from a run with data.documents"
        " with --nocache"
      )
    return {
      layer: attention.init_cache(
        config.patterns[layer],
        length=config.length,
        batch=batch,
        num_heads=config.num_heads,
        num_key_heads=config.num_key_heads,
        qk_width=config.head_width,
        value_width=config.width // config.num_heads,
        dtype=config.dtype,
        layers=len(stack),
      )
      for layer, stack in stacks.stacks(config).items()
    }

  def prefill(self, params: dict, tokens_BL: jax.Array) -> Caches:
    """Computes the caches after a prompt, all its positions at once."""

    def attend(caches, layer, index, *inputs, **keywords):
      given = dict(layer=index, directions=keywords.get("directions"))
      new = attention.fill_cache(caches[layer], *inputs, **given)
      caches = caches | {layer: new}
      return model.attend(caches, layer, index, *inputs, **keywords)

    caches = self.init(len(tokens_BL))
    if not tokens_BL.shape[1]:
      return caches
    model = transformer.bind(self.config, params)
    return model.run_blocks(model.embed(tokens_BL), attend, caches)[1]

  def step(
    self, params: dict, caches: Caches, tokens_B: jax.Array, t: jax.Array
  ) -> tuple[jax.Array, Caches]:
    """Predicts position t, see `sampling.Decoder`."""

    def attend(caches, layer, index, *inputs, **keywords):
      q_BHK, k_BGK, v_BGE = (x[:, 0] for x in inputs)
      keywords |= dict(layer=index)
      out_BHE, new = attention.attend_next(
        caches[layer], q_BHK, k_BGK, v_BGE, t, **keywords
      )
      return out_BHE[:, None], caches | {layer: new}

    model = transformer.bind(self.config, params)
    x_B1D = model.embed_next(tokens_B, t)
    x_B1D, caches, _ = model.run_blocks(x_B1D, attend, caches, first=t)
    return model.unembed(x_B1D)[:, 0], caches

  def num_bytes(self, batch: int) -> int:
    """Size of the caches in bytes."""
    caches = jax.eval_shape(lambda: self.init(batch))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))
