"""The networks in weights/ score what their cards say."""

import json

import pytest
import runs
import small_data

from benchmarks import record

SHARED = small_data.SHARED / "tensorflow_datasets"
SLOW = "cifar10_medium", "cifar10_large"  # minutes on a CPU


@pytest.mark.parametrize(
  "name", ["digits", *(pytest.param(x, marks=pytest.mark.soak) for x in SLOW)]
)
def test_weights_score_what_their_card_says(name, tmp_path):
  words = [f"--config={runs.REPO}/configs/{name}.py"]
  if name != "digits":
    if not SHARED.is_dir():
      pytest.skip("needs CIFAR-10")
    words.append(f"--config.data.path={SHARED}")
  file = runs.REPO / "weights" / f"{name}.safetensors"
  workdir, card = f"--workdir={tmp_path / 'run'}", record.read(name)
  convert = "sparse_transformer/convert.py"
  assert runs.command(convert, file, workdir, *words) == 0
  # Optimized, as for users: it takes minutes.
  optimized = dict(JAX_DISABLE_MOST_OPTIMIZATIONS=0)
  done = runs.python("eval.py", workdir, "--split=validation", **optimized)
  (bits,) = (
    x["bits_per_dim"]
    for x in card["evaluations"]
    if (x["split"], x["step"]) == ("validation", card["steps"])
  )
  assert abs(json.loads(done.stdout)["bits_per_dim"] - bits) < 1e-4
