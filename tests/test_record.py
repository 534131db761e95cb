"""Records of runs: how each was trained, and what it scored."""

import json

import numpy as np
import pytest
from helpers import comparisons, runs

from benchmarks import record, run
from sparse_transformer import config as config_lib

pytestmark = pytest.mark.tools


@pytest.fixture
def workdir(tmp_path):
  """The files of a run on clips with two fields changed."""
  from configs import video

  config = video.get_config()
  config.data.fractions = (0.5, 0.25, 0.25)
  config.data.path = f"{tmp_path}/clips.npy"
  np.save(config.data.path, np.zeros((8, 256, 16), np.uint8))
  folder = tmp_path / "x" / "seed0"
  config_lib.write_config(folder, config)
  lines = [
    dict(step=1, split="train", seconds=2.5, nats=1.0, bits_per_dim=1.5),
    dict(step=2, split="validation", seconds=4.5, bits_per_dim=1.5),
  ]
  (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
  (folder / "evaluations").mkdir()
  evaluation = dict(
    split="test",
    min_context=0,
    bits_per_dim=1.25,
    examples=2,
    command=f"--x={tmp_path}/y",
    by_position=[1.0, None, 1.5],
  )
  (folder / "evaluations" / "test-2.json").write_text(json.dumps(evaluation))
  return folder


def command(workdir, *words):
  config = f"--config={runs.REPO}/configs/video.py"
  words = config, f"--workdir={workdir}", *words
  return runs.command("benchmarks/run.py", *words)


def test_record_of_a_run_has_its_command_scores_and_times(workdir, tmp_path):
  out = tmp_path / "records" / "x.json"
  assert command(workdir, f"--out={out}") == 0
  found = json.loads(out.read_text())

  assert found["command"] == (
    "python train.py --config=video.py --workdir=runs/seed0"
    " '--config.data.fractions=(0.5, 0.25, 0.25)' --config.data.path=clips.npy"
  )
  assert found["parameters"] == 108_992
  assert found["steps"] == 2
  assert found["seconds"] == 4.5
  assert found["processor_seconds"] is None
  (evaluation,) = found["evaluations"]
  assert evaluation["bits_per_dim"] == 1.25
  assert "by_position" not in evaluation
  assert found["validation"] == [
    dict(
      step=2,
      bits_per_dim=1.5,
      seconds=4.5,
    )
  ]
  assert str(tmp_path) not in out.read_text()
  (tested,) = run.evaluated(tmp_path)
  assert tested["by_position"] == [1.25]  # of the scored ones


def test_record_of_a_comparison_is_kept_without_folders(tmp_path, monkeypatch):
  monkeypatch.setattr(record, "FOLDER", tmp_path)
  content = comparisons.record(
    comparisons.run("dense", 0, 2.0),
    command="python -m x '--config.data.path=/some/a.txt' --workdir=/some/mine",
    config={"data": {"path": "/some/a.txt"}},
  )
  record.write(tmp_path / "mine" / "comparison.json", content)
  words = "benchmarks/run.py", f"--workdir={tmp_path / 'mine'}"
  assert runs.command(*words) == 0
  kept = (record.FOLDER / "mine.json").read_text()

  assert "/some" not in kept
  assert json.loads(kept)["runs"] == content["runs"]
