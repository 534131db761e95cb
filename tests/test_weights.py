"""The networks in weights/ score what their cards say."""

import json

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
  workdir = f"--workdir={tmp_path / 'run'}"
  convert = "sparse_transformer/convert.py"
  assert runs.command(convert, file, workdir, *words) == 0
  capfd.readouterr()
  assert runs.command("eval.py", workdir, "--split=validation") == 0
  found = json.loads(capfd.readouterr().out)
  (card,) = (
    x
    for x in record.read(name)["evaluations"]
    if x["split"] == "validation" and x["examples"] == found["examples"]
  )
  assert abs(found["bits_per_dim"] - card["bits_per_dim"]) < 1e-4
