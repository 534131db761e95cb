"""The network of Child et al. 2019, its key-value cache, and sampling."""

from sparse_transformer.model.configure import (
  Config as Config,
  configure as configure,
)
from sparse_transformer.model.options import (
  LOSS_WEIGHTS as LOSS_WEIGHTS,
  project as project,
)
from sparse_transformer.model.stacks import (
  Measured as Measured,
  layers_of as layers_of,
  num_stacks as num_stacks,
  period as period,
)
from sparse_transformer.model.transformer import (
  Transformer as Transformer,
  count_active_parameters as count_active_parameters,
  count_parameters as count_parameters,
  init_params as init_params,
  make_apply as make_apply,
  make_predict as make_predict,
  param_shapes as param_shapes,
)
