"""Tests of the names of targets."""

import pytest

from sparse_transformer.targets import hardware


@pytest.mark.parametrize(
  "name, full, compiler, devices",
  [
    ("h100", "h100:1x1x1", "cuda", 1),
    ("a100:2x1x8", "a100:2x1x8", "cuda", 16),
    ("rtx4090", "rtx4090:1x1x1", "cuda", 1),
    ("v5e", "v5e:1x1", "tpu", 1),
    ("v5e:2x2", "v5e:2x2", "tpu", 4),
    ("v6e:16x16", "v6e:16x16", "tpu", 256),
  ],
)
def test_names(name, full, compiler, devices):
  target = hardware.parse(name)
  assert str(target) == full
  assert hardware.parse(full) == target

  capability = dict(
    a100=8.0,
    h100=9.0,
    rtx4090=8.9,
  ).get(target.kind, 0.0)

  assert target.capability == capability
  assert target.compiler == compiler
  assert target.num_devices == devices
  assert 15 * 2**30 < target.memory < 150 * 2**30


def test_description_lists_all():
  lines = hardware.describe().splitlines()
  assert [line.split()[0] for line in lines[1:]] == list(hardware.KINDS)
