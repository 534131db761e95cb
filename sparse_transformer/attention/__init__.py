"""Sparse attention: one interface, several backends, a plain reference."""

from sparse_transformer.attention import (
  platforms as platforms,
  registry as registry,
)
from sparse_transformer.attention.adapters import (
  as_attention_fn as as_attention_fn,
)
from sparse_transformer.attention.content.binding import (
  find_pairs as find_pairs,
)
from sparse_transformer.attention.content.grouping import (
  group_by_label as group_by_label,
)
from sparse_transformer.attention.contract import (
  SAVED_NAMES as SAVED_NAMES,
  Features as Features,
  Request as Request,
  Scores as Scores,
  Split as Split,
  Unsupported as Unsupported,
  bias_at as bias_at,
)
from sparse_transformer.attention.decoding import (
  Cache as Cache,
  attend_next as attend_next,
  fill_cache as fill_cache,
  init_cache as init_cache,
)
from sparse_transformer.attention.description import (
  Description as Description,
  describe as describe,
)
from sparse_transformer.attention.dispatch import attend as attend
from sparse_transformer.attention.heads import (
  group_heads as group_heads,
  index_of as index_of,
)
from sparse_transformer.attention.verification import (
  verify as verify,
  verify_request as verify_request,
)
