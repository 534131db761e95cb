"""The network of Child et al. 2019, its key-value cache, and sampling."""

from sparse_transformer.model.hyperparameters import (
  Config as Config,
  configure as configure,
  num_positions as num_positions,
  schedule as schedule,
)
from sparse_transformer.model.pattern_params import (
  clip_spans as clip_spans,
  learned_patterns as learned_patterns,
)
from sparse_transformer.model.transformer import (
  Measured as Measured,
  Transformer as Transformer,
  count_active_parameters as count_active_parameters,
  count_parameters as count_parameters,
  init_params as init_params,
  make_apply as make_apply,
  make_predict as make_predict,
  num_stacks as num_stacks,
  param_shapes as param_shapes,
)
