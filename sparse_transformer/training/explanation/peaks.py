"""Peak rates of accelerators, against which utilization is measured."""

import jax

# Rates of dense matrix products, in FLOPs per second of one JAX device, by
# dtype: "float32" as JAX multiplies it by default, in TensorFloat-32 on GPUs
# that have it and in bfloat16 on TPUs; "highest" without such rounding.
Rates = dict[str, float]


def _gpu(half: float, highest: float) -> Rates:
  return Rates(bfloat16=half, float16=half, float32=half / 2, highest=highest)


def _tpu(bfloat16: float) -> Rates:
  return Rates(bfloat16=bfloat16, float32=bfloat16)


_HOPPER_SXM, _HOPPER_PCIE = _gpu(989.4e12, 66.9e12), _gpu(756e12, 51.2e12)
_AMPERE = _gpu(312e12, 19.5e12)
# Without bfloat16 and TensorFloat-32.
_VOLTA = Rates(float16=125e12, float32=15.7e12, highest=15.7e12)


# By JAX's `device_kind`. Sources: NVIDIA's white papers on the architectures of
# Hopper (H100 SXM5 and PCIe; the H200 has the same chip), Ampere (A100) and
# Volta (V100 SXM2), without sparsity; the system architecture pages of Cloud
# TPU (cloud.google.com/tpu/docs). How JAX multiplies float32 by default: its
# page on matmul precision (docs.jax.dev/en/latest/201/precision.html).
PEAKS: dict[str, Rates] = {
  "NVIDIA H100 PCIe": _HOPPER_PCIE,
  **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), _HOPPER_SXM),
  **{f"NVIDIA A100-{x}": _AMPERE for x in ("SXM4-40GB", "SXM4-80GB")},
  **{f"NVIDIA A100{x}": _AMPERE for x in ("-PCIE-40GB", " 80GB PCIe")},
  **{f"Tesla V100-SXM2-{x}GB": _VOLTA for x in (16, 32)},
  "TPU v4": _tpu(275e12),
  **dict.fromkeys(("TPU v5 lite", "TPU v5e"), _tpu(197e12)),
  **dict.fromkeys(("TPU v5", "TPU v5p"), _tpu(459e12)),
  **dict.fromkeys(("TPU v6 lite", "TPU v6e"), _tpu(918e12)),
}
# Values of `jax_default_matmul_precision` that `Rates` covers.
_BY_DEFAULT, _HIGHEST = (None, "default"), ("highest", "float32")


def peak_flops(device_kind: str, dtype: str) -> float | None:
  """FLOPs per second that a kind of JAX device can reach; None if unknown.

  The dtype is that of operands; `jax_default_matmul_precision` counts.
  """
  rates = PEAKS.get(device_kind, {})
  precision = jax.default_matmul_precision.value
  if dtype != "float32" or precision in _BY_DEFAULT:
    return rates.get(dtype)
  return rates.get("highest") if precision in _HIGHEST else None
