"""Receptive fields of networks: how much they see, and which symbols."""

import pytest
from helpers import networks

from sparse_transformer import patterns
from sparse_transformer.training.reports import receptive_field

# Clips of 4 gray frames of 4 x 4 pixels: a pixel's place one frame back is 16
# symbols before it, and the one above it 4.
CLIPS = dict(shape=(16, 4, 1), length=64)


def measure(pattern, num_layers=2, **changes):
  """The receptive field of a network that has a pattern in all heads."""
  layers = ((patterns.parse(pattern)[0][0],),) * num_layers
  config = networks.config(
    patterns=layers,
    num_layers=num_layers,
    num_heads=1,
    **changes,
  )
  return receptive_field.measure(config)


@pytest.mark.parametrize(
  "pattern, symbols, above, frame_back",
  [
    # Inputs are shifted: a window of w holds the w symbols before its target.
    ("Local(2)", 3, "no", "no"),
    ("Local(3)", 5, "yes", "no"),
    ("Local(9)", 17, "yes", "yes"),
    # A column at a distance of 16 holds the symbol 17 before the target, and in
    # two layers that 33 before it.
    ("Strided(16)", 4, "no", "no"),
    ("Strided(16, 1)", 7, "no", "yes"),
    ("Causal()", 63, "yes", "yes"),
  ],
)
def test_what_a_network_sees_of_clips(pattern, symbols, above, frame_back):
  found = measure(pattern, **CLIPS)
  shares = {name: receptive_field.share(x) for name, x in found.sees.items()}

  assert found.symbols == symbols
  assert shares == {
    receptive_field.ABOVE: above,
    receptive_field.FRAME_BACK: frame_back,
  }


def test_only_some_positions_may_see_a_symbol():
  # Blocks are two rows. The byte above is 3 keys before its query, in the same
  # block for 5 of 8 positions, and for all 4 in the second row.
  found = measure("Block(8)", num_layers=1, shape=(16, 4, 1), length=64)
  assert receptive_field.share(found.sees[receptive_field.ABOVE]) == "65 %"


def test_texts_and_classifiers_have_no_symbol_above():
  assert measure("Local(3)", shape=(64,), length=64).sees == {}

  found = measure("Local(3)", task="classify", classes=2, **CLIPS)
  assert found.symbols == 5
  assert found.sees == {}


def test_content_may_choose_any_earlier_key():
  assert measure("TopBlocks(4, 1)", num_layers=1, **CLIPS).symbols == 63
