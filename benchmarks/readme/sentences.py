"""Pieces of the README's text with numbers, made from records or known to hold.

Those of records must occur in it. A number outside of these, of tables and of
code is an error: a result needs a record.
"""

from collections.abc import Iterator

from benchmarks import report
from benchmarks.readme import records, tables

# Numbers that are no results of ours.
FIXED = (
  "16 samples (left) and 16 real digits (right)",
  "Child et al. 2019",
  "Python 3.11, 3.12 or 3.13",
  "64 x 64 x 3",
  "exits with status 130",
  "blocks of 16,384 bytes of a text",
  "(section 6 of the paper)",
  "paper's Table 3",
  "over 256 symbols scores exactly 8.",
  "at distances 1, 2, 4, 8, ...",
  "20,000 steps",
  "Apache 2.0.",
)


def of_records() -> list[str]:
  """The pieces that are made from records."""
  return [*quickstart(), *speed(), *compiled(), *sampling()]


def quickstart() -> Iterator[str]:
  times = records.read("commands")
  yield (
    f"evaluates: {records.minutes(times['quickstart']['seconds'])} on 2 CPU"
    " cores"
  )
  yield f"test suite: {records.minutes(times['test']['seconds'])}"
  bits = records.test_bits(records.read("digits"))
  baseline = records.read("independent")["test"]
  yield f"The quickstart ends with {bits:.2f} bits/dim"
  yield f"a model of independent pixels scores {baseline:.2f}"


def speed() -> Iterator[str]:
  about = records.read("attention-amd-epyc-2-threads")
  versions = about["versions"]
  jax, torch = versions["jax"]["jax"], versions["torch"]["torch"]
  yield (
    "Forward + backward, float32, 4 heads of width 64, batch 1, n = 12,288, on"
    " {threads} cores of an {name}".format(**about["machine"])
    + f" with jax {jax} and torch {torch.partition('+')[0]}"
  )
  times = {
    (row["program"], row["pattern"]): row
    for row in tables.attention_rows("12288")
  }

  def ms(program, pattern, name=tables.PASS):
    return f"{1e3 * times[program, pattern][name]['median']:,.0f}"

  yield f"`scaled_dot_product_attention`, {ms('sdpa', 'Causal()')} ms)"
  yield "which would be the speed-up if time were proportional to pairs"
  yield "1 is the best possible"
  strided = "Local(128) | Strided(128)"
  yield f"`jax.nn.dot_product_attention` takes {ms('jax_nn', 'Causal()')} ms"
  yield (
    f"local-attention {ms('local_attention', 'Local(128)')} ms with a window of"
    " 128"
  )
  yield f"takes {ms('flex', strided, 'forward')} ms for the strided mask"
  yield f"ours takes {ms('ours', strided, 'forward')}"
  growth = tables.attention_rows("growth", tables.OURS)
  power = report.exponent(growth, tables.PASS)
  first, *_, last = [row["n"] for row in growth]
  yield f"grows as n^{power:.2f} from n = {first:,} to {last:,}"
  (million,) = tables.attention_rows("million", tables.OURS)
  seconds = million[tables.PASS]["median"]
  size = million["process_bytes"] / 2**30
  yield (
    f"at n = {million['n']:,} one head takes {seconds:.0f} s and {size:.1f} GiB"
  )
  errors = [
    error
    for case in ("oracle", "3072", "12288")
    for row in tables.attention_rows(case, tables.OURS)
    for error in row.get("errors", [])
  ]
  yield f"with FlexAttention to {max(errors):.0e}".replace("e-0", "e-")


def compiled() -> Iterator[str]:
  yield "One step on an H100, batch 16, bfloat16, as compiled for it"
  yield "has the other presets, 8 GPUs and TPUs"


def sampling() -> Iterator[str]:
  yield (
    "At n = 12,288 with 4 layers of 8 heads of width 64, on {threads} cores of"
    " an {name}".format(
      **records.read("sampling-amd-epyc-2-threads")["machine"]
    )
  )
