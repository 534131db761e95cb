"""The fused kernels for GPUs, in Pallas' interpreter."""

import executor_laws as laws
import pytest

from sparse_transformer.attention import registry
from sparse_transformer.attention.triton import Triton
from sparse_transformer.patterns import (
  Block,
  Causal,
  Local,
  RandomBlocks,
  Strided,
  Summary,
)

FIXED = tuple(Block(32) | Summary(32, 8, shift) for shift in (0, 1))
MIXES = {
  "parts that share an order": (*FIXED, Local(17)),
  "parts in two slots": (Local(12) | Strided(12), Strided(5)),
  "rows and a head without keys": (
    RandomBlocks(4, 2) - Local(9),
    Causal() - Causal(),
  ),
}


@pytest.fixture
def interpreted():
  registry.register("interpreted", Triton(interpret=True))
  yield "interpreted"
  registry.unregister("interpreted")


@pytest.mark.parametrize("n, mix", [*zip((70, 64, 33), MIXES, strict=True)])
def test_kernels_agree_with_the_reference(n, mix, interpreted):
  inputs = laws.random_inputs(n, len(MIXES[mix]), k=16, e=32)
  found = laws.run(*inputs, MIXES[mix], interpreted, 32)
  laws.assert_close(found, laws.reference(*inputs, MIXES[mix]))
