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
  causal = {
    patterns.CATALOGUE[name]
    for name, found in examples.STATIC.items()
    if found.causal
  }
  kinds = set()
  for text in benchmark.oracle():
    pattern = worker.pattern_of(worker.Entry("ours", text, 96))
    kinds.add(type(pattern))
    assert not np.triu(pattern.matrix(96), 1).any()
  assert causal <= kinds


def test_reference_agrees_with_dense_attention():
  import jax

  pattern = patterns.Local(5) - patterns.Block(3)  # has empty rows
  n = 24
  random = np.random.default_rng(0)
  q, k, v, dout = random.standard_normal((4, 1, n, 2, 8), np.float32)

  def attend(q):
    return attention.attend(q, k, v, pattern, backend="dense")

  out, pullback = jax.vjp(attend, q)
  (dq,) = pullback(dout)
  rows = np.arange(0, n, 2)
  inputs = (x[0].astype(np.float64) for x in (q, k, v, dout))
  mask = worker.mask_of(worker.Entry("ours", "", n), pattern, rows)
  found_out, found_dq = worker.reference(*inputs, mask, rows)
  np.testing.assert_allclose(found_out, out[0, rows], atol=1e-5)
  np.testing.assert_allclose(found_dq, dq[0, rows], atol=1e-5)


def row(milliseconds, **changes):
  """A row of a program's median time, forward."""
  values = dict(
    program="ours",
    pattern="Causal()",
    n=100,
    batch=2,
    heads=3,
    width=10,
    dtype="float32",
    pairs=5050,
    forward={"median": milliseconds},
  )
  return values | changes


def test_speedup_is_over_the_fastest_dense_program_of_the_same_size():
  dense = row(8.0)
  sparse = row(2.0, pattern="Local(10)", pairs=505)
  rows = [
    dense,
    row(4.0, program="sdpa"),
    row(0.5, program="sdpa", n=50, pairs=1275),
    row(0.5, program="sdpa", batch=1),
    sparse,
  ]
  report.add_ratios(rows)
  assert sparse["speedup"] == {"forward": 2.0}
  assert sparse["ideal"] == 10
  assert dense["speedup"] == {"forward": 0.5}


def test_exponent_of_a_power():
  rows = [row(3e-9 * n**1.5, n=n) for n in (64, 256, 4096)]
  assert report.exponent(rows, "forward") == pytest.approx(1.5)
  assert report.exponent(rows[:1], "forward") is None
