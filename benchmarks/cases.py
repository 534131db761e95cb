"""The cases of the attention benchmark: which programs run at which sizes."""

import dataclasses

from sparse_transformer import patterns

STRIDED = "Local({l}) | Strided({l})".format
FIXED = "Block(128) | Summary(128, 32)"
BIGBIRD = "BigBird(block=64, window=3, num_global=1, num_random=3, seed=0)"
MEASURED = (
  "Causal()",
  "Local(128)",
  "Strided(128)",
  "Block(128)",
  "Summary(128, 32)",
  STRIDED(l=128),
  FIXED,
  BIGBIRD,
)
ALGEBRA = (
  "Local(23) | Strided(23)",
  "Block(32) | Summary(32, 8)",
  "Causal() - Block(64)",
  "Strided(16) & Local(128)",
)


@dataclasses.dataclass(frozen=True)
class Entry:
  """A program of `ours.py` or `peers.py` that runs a pattern, an expression."""

  program: str
  pattern: str
  n: int
  batch: int = 1
  heads: int = 4
  width: int = 64
  dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Case:
  """Entries whose measurements are interleaved."""

  title: str
  entries: tuple[Entry, ...]
  rounds: int = 0  # if 0, only results are checked


def oracle():
  """Causal examples of every pattern in the catalogue, and combinations."""
  examples = (found.causal for found in patterns.examples().values())
  return *(str(pattern) for some in examples for pattern in some), *ALGEBRA


def _entries(n, programs):
  """Entries of one length, from {pattern: programs}."""
  return tuple(Entry(x, p, n) for p in programs for x in programs[p])


def cpu():
  """{name: case} for CPUs."""
  both = dict.fromkeys(oracle(), ("ours", "flex_eager"))
  small = {
    "Local(128)": ("ours", "local_attention", "flex"),
    STRIDED(l=96): ("ours", "sdpa_mask", "flex"),
    "Causal()": ("ours", "sdpa", "jax_nn"),
  }
  peers = {
    "Causal()": ("sdpa", "jax_nn"),
    "Local(128)": ("local_attention", "flex"),
    STRIDED(l=128): ("flex",),
    FIXED: ("flex",),
  }
  large = dict.fromkeys(MEASURED, ("ours",))
  growth = (Entry("ours", STRIDED(l=x), x**2) for x in (64, 128, 256, 512))
  million = Entry("ours", STRIDED(l=1024), 2**20, heads=1)
  return {
    "oracle": Case("FlexAttention as an oracle, n = 512", _entries(512, both)),
    "3072": Case("n = 3,072", _entries(3072, small), 7),
    "12288": Case(
      "n = 12,288", _entries(12_288, large) + _entries(12_288, peers), 5
    ),
    "growth": Case("growth with n, l = sqrt n", tuple(growth), 3),
    "million": Case("n = 1,048,576, one head", (million,), 1),
  }


def quick():
  programs = {
    "Local(64)": ("ours", "local_attention"),
    STRIDED(l=32): ("ours",),
    "Causal()": ("jax_nn", "sdpa"),
  }
  return {"quick": Case("quick, n = 1,024", _entries(1024, programs), 2)}
