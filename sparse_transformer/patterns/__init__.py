"""Attention patterns: which query attends to which key.

A pattern is a small immutable value: a set of pairs (query, key). Its `mask`
defines the set, and everything else is derived from the mask. Patterns know
nothing about batches, heads, dtypes, devices, tiles or sequence lengths.

The paper (Child et al. 2019, arXiv 1904.10509) uses other symbols: l is
`stride`, `window` or `size`; c is `width`; p is the number of factors; A_i^(m)
is row i of factor m.

To add a pattern, write one class with a `mask`, in `catalogue` or in a module
of your own, and decorate it with `register`.

>>> pattern = Local(2) | Strided(3)
>>> print(pattern.matrix(6).astype(int))
[[1 0 0 0 0 0]
 [1 1 0 0 0 0]
 [0 1 1 0 0 0]
 [1 0 1 1 0 0]
 [0 1 0 1 1 0]
 [0 0 1 0 1 1]]
>>> pattern.pairs(1024)
176298
"""

from sparse_transformer.patterns import analysis as analysis
from sparse_transformer.patterns.analysis import (
  first_leak as first_leak,
  has_pairs as has_pairs,
)
from sparse_transformer.patterns.base import (
  CATALOGUE as CATALOGUE,
  CONTENT as CONTENT,
  Difference as Difference,
  Intersection as Intersection,
  Pattern as Pattern,
  Union as Union,
  check_fields as check_fields,
  register as register,
  signature as signature,
)
from sparse_transformer.patterns.catalogue import *  # noqa: F403  see its __all__
from sparse_transformer.patterns.checks import shorten as shorten
from sparse_transformer.patterns.content import (
  Content as Content,
  Known as Known,
)
from sparse_transformer.patterns.content_catalogue import *  # noqa: F403
from sparse_transformer.patterns.functions import (
  explicit as explicit,
  where as where,
)
from sparse_transformer.patterns.layout import Layout as Layout
from sparse_transformer.patterns.named import (
  FACTORIZATIONS as FACTORIZATIONS,
  MODES as MODES,
  PUBLISHED as PUBLISHED,
  assign as assign,
  bidirectional as bidirectional,
  factorize as factorize,
  parse as parse,
)
