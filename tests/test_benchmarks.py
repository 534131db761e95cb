"""The benchmarks run, and their arithmetic is right."""

import json

import numpy as np
import pytest
from helpers import examples, runs

from benchmarks import attention as benchmark, report, worker
from sparse_transformer import attention, patterns

pytestmark = pytest.mark.tools


def test_quick_run_measures_ours_and_writes_json(tmp_path):
  out = tmp_path / "results" / "quick.json"
  words = "--cases=quick", "--rounds=1", f"--out={out}"
  done = runs.python("-m", "benchmarks.attention", *words)

  assert done.returncode == 0, done.stderr
  assert "Local(64)" in done.stdout
  text = out.read_text()
  assert str(runs.REPO) not in text
  rows = json.loads(text)["cases"]["quick"]["rows"]
  ours = [row for row in rows if row["program"] == "ours"]

  assert len(ours) == 2
  for row in ours:
    assert row["forward"]["median"] > 0
    assert row["forward_backward"]["median"] > 0
    assert max(row["errors"]) < 1e-4
    assert row["computed_per_pair"] > 1
  assert {row["program"] for row in rows} >= {"ours", "jax_nn"}


def test_oracle_has_every_class_with_a_causal_form_and_causal_patterns_only():
  entries = [worker.Entry("ours", text, 96) for text in benchmark.oracle()]
  shown = [worker.pattern_of(entry) for entry in entries]
  causal = {
    patterns.CATALOGUE[name]
    for name, found in examples.STATIC.items()
    if found.causal
  }

  assert causal <= set(map(type, shown))
  assert not any(np.triu(pattern.matrix(96), 1).any() for pattern in shown)


def test_reference_agrees_with_dense_attention():
  import jax

  # has empty rows
  pattern = patterns.Local(5) - patterns.Block(3)
  n = 24
  rng = np.random.default_rng(0)
  q, k, v, dout = rng.standard_normal((4, 1, n, 2, 8), np.float32)

  def attend(q):
    return attention.attend(q, k, v, pattern, backend="dense")

  out, pull = jax.vjp(attend, q)
  rows = np.arange(0, n, 2)
  inputs = (x[0].astype(np.float64) for x in (q, k, v, dout))
  mask = worker.mask_of(worker.Entry("ours", "", n), pattern, rows)
  got_out, got_dq = worker.reference(*inputs, mask, rows)

  np.testing.assert_allclose(got_out, out[0, rows], atol=1e-5)
  np.testing.assert_allclose(got_dq, pull(dout)[0][0, rows], atol=1e-5)


def _row(**changes):
  row = dict(
    program="ours",
    pattern="Causal()",
    n=100,
    batch=2,
    heads=3,
    width=10,
    dtype="float32",
    pairs=5050,
  )
  return row | changes


def test_speedup_is_over_the_fastest_dense_program_of_the_same_size():
  def times(x):
    return {"forward": {"median": x}}

  rows = [
    _row(**times(8.0)),
    _row(program="sdpa", **times(4.0)),
    _row(program="sdpa", n=50, pairs=1275, **times(0.5)),
    _row(pattern="Local(10)", pairs=505, **times(2.0)),
  ]
  report.add_ratios(rows)

  assert rows[3]["speedup"] == {"forward": 2.0}
  assert rows[3]["ideal"] == 10
  assert rows[0]["speedup"] == {"forward": 0.5}


def test_exponent_of_a_power():
  rows = [_row(n=n, forward={"median": 3e-9 * n**1.5}) for n in (64, 256, 4096)]
  assert report.exponent(rows, "forward") == pytest.approx(1.5)
  assert report.exponent(rows[:1], "forward") is None
