"""The networks in weights/ score what their cards say."""

import pytest
import runs
import small_data

from benchmarks import record

SHARED = small_data.SHARED / "tensorflow_datasets"


@pytest.mark.parametrize(
  "name", ["digits", pytest.param("cifar10_medium", marks=pytest.mark.soak)]
)
def test_weights_score_what_their_card_says(name, tmp_path, capfd):
  words = [f"--config={runs.REPO}/configs/{name}.py"]
  if name != "digits":
    if not SHARED.is_dir():
      pytest.skip("needs CIFAR-10")
    words.append(f"--config.data.path={SHARED}")
  file = runs.REPO / "weights" / f"{name}.safetensors"
  convert = "sparse_transformer/convert.py"
  assert (
    runs.command(convert, file, f"--workdir={tmp_path / 'run'}", *words) == 0
  )
  split, card = "--split=validation", record.read(name)
  (found,) = runs.scores(capfd, tmp_path / "run", split)
  (bits,) = (
    x["bits_per_dim"]
    for x in card["evaluations"]
    if (x["split"], x["step"]) == ("validation", card["steps"])
  )
  assert abs(found["bits_per_dim"] - bits) < 1e-4
