"""Tests of training/explanation/peaks.py."""

import jax
import pytest

from sparse_transformer.attention.arguments import DTYPES
from sparse_transformer.training.explanation import peaks
from sparse_transformer.training.explanation.peaks import peak_flops

H100, V5E = "NVIDIA H100 80GB HBM3", "TPU v5 lite"


def test_peak_depends_on_the_dtype_and_on_the_precision_of_float32():
  assert peak_flops(H100, "bfloat16") == peak_flops(H100, "float16") == 989.4e12
  assert peak_flops(H100, "float32") == 494.7e12  # TensorFloat-32
  assert peak_flops(V5E, "float32") == peak_flops(V5E, "bfloat16") == 197e12
  assert peak_flops("Tesla V100-SXM2-16GB", "bfloat16") is None
  assert peak_flops("cpu", "float32") is None
  with jax.default_matmul_precision("highest"):
    assert peak_flops(H100, "float32") == 66.9e12
    assert peak_flops(H100, "bfloat16") == 989.4e12
    assert peak_flops(V5E, "float32") is None
  with jax.default_matmul_precision("high"):
    assert peak_flops(H100, "float32") is None


@pytest.mark.parametrize("kind", peaks.PEAKS)
def test_rates_of_a_device_are_of_known_dtypes_and_in_order(kind):
  rates = peaks.PEAKS[kind]
  assert rates.keys() <= {*DTYPES, "highest"}
  assert all(1e13 < rate < 1e15 for rate in rates.values())
  assert rates.get("highest", 0) <= rates["float32"]
  assert rates["float32"] <= max(rates.values())
