"""The generated parts of docs/evidence.md, and what the README repeats of them.

Every error is half of a 95 % confidence interval over seeds. The interval of a
difference is Welch's; the error in brackets is that of paired differences, of
runs with the same seed. Receptive fields are computed from the patterns, layers
and lengths of the records.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import scipy.stats

from benchmarks import record
from benchmarks.readme import receptive
from sparse_transformer import patterns, tables

COUNTS = "counts after up to 7 bytes"
LARGE, NEARBY = "cifar10_large", "32 nearby bytes in each layer"
# By record of a run: its data, its pattern, and rows of the record of baselines
# of the same data.
TRAINED = {
  "digits": ("8 x 8 digits", "strided", ("digits", "independent positions")),
  "cifar10_medium": (
    "CIFAR-10",
    NEARBY,
    ("cifar10", "`JPEG XL -e 9`", "linear, 12 pixels"),
  ),
  LARGE: ("CIFAR-10", NEARBY, ("cifar10",)),
  "text_medium": (
    "6 MB of Wikipedia",
    "a window of 128 bytes",
    ("bytes", "`PPMd -o16`", "`PPMd -o6`", COUNTS),
  ),
}
SPLITS = "test", "validation"
ABOVE_BACK, SEES_ABOVE = 96, "sees the byte above"
COLUMN, PAPERS = "Local(16) | Strided(96, 1)", "Local(16) | Strided(96)"
ABOVE = "Local(16) | Strided(96, 1) & Local(97)"
AROUND_ABOVE = "Local(16) | Local(104) - Local(88)"
WINDOWS = "Local(144)"  # beside far keys
MEMORY = "end_to_end_memory"  # of compiled steps
DENSE_LAYERS_WINDOW = "Local(128)"
DIGITS_ABOVE_BACK = 8
DIGITS_ONE_KEY = "Local(2) | (Strided(8, 1) & Local(8)) with model.num_layers=2"
# By record: its setting, the window beside the columns, if there is one, and
# pairs of the target's column and the paper's, with what tells them apart.
COLUMNS: dict[str, tuple[str, str, dict[str, tuple[str, str]]]] = {
  "cifar10_keys": (
    "2 layers, 400 steps",
    "Local(36)",
    {"": (COLUMN, PAPERS)},
  ),
  "cifar10_keys_repeated": (
    "2 layers, 400 steps, three other seeds",
    "Local(36)",
    {"": (COLUMN, PAPERS)},
  ),
  "cifar10_deep": (
    "4 layers, 300 steps",
    "Local(36)",
    {"": (COLUMN, PAPERS)},
  ),
  "cifar10_reach": (
    "4 layers, 300 steps, longer windows",
    "",
    {
      f", of {size}": (
        f"Local({size}) | Strided(96, 1)",
        f"Local({size}) | Strided(96)",
      )
      for size in (36, 96)
    },
  ),
}
# Comparisons on copyright files, with seeds 0 to 2 and with three other seeds.
FAR_KEYS, REPEATED = "far_keys", "far_keys_repeated"
PALESTRINA = "match_palestrina"
ONE_HEAD = "(Local(128), Local(128), Local(128), {}),"
LEARNED = " with model.positions=learned"  # else they are rotary
# Counts and compressors beside them.
COPY_RULE = f"copy of the last match, else {COUNTS}"
WITHOUT = (
  "`PPMd -o16`",
  "`xz -9e`",
  "`PPMd -o6`, window alone",
  "`PPMd -o16`, window alone",
  "counts after a byte",
  COUNTS,
  COPY_RULE,
)
EARLY = 250  # step at which the curves of far keys are shown
# By orders of digits: choices in which the network is given the order, or not.
ORDERS = {
  "4: turned": ("('rotation',)", "() with data.name=digits_rotated"),
  "192: also transposed, quarters permuted": (
    "('rotation','transposition','jigsaw')",
    "() with data.name=digits_puzzles",
  ),
}
# On the test split of CIFAR-10, without augmentation.
PUBLISHED_BITS = "2.80"  # Child et al. 2019, Table 1
PUBLISHED = {
  "PixelCNN": ("3.14", "1601.06759"),
  "Glow": ("3.35", "1807.03039"),
  "Real NVP": ("3.49", "1605.08803"),
}


def interval(
  values: Sequence[float], than: Sequence[float] = (), *, digits: int = 3
) -> str:
  """The mean of some values, or the difference of two means, with its error.

  One or two values are listed: they say little about their error.

  >>> interval([1.0, 1.1, 0.9]), interval([2.0, 2.1], [1.0, 1.1])
  ('1.000 ± 0.248', '+1.000 ± 0.304')
  """
  if len(values) < 3 and not than:
    return ", ".join(f"{x:.{digits}f}" for x in values)
  if than:
    test, sign = scipy.stats.ttest_ind(values, than, equal_var=False), "+"
  else:
    test, sign = scipy.stats.ttest_1samp(values, 0), ""
  low, high = test.confidence_interval()
  mean, error = (low + high) / 2, (high - low) / 2
  return f"{mean:{sign}.{digits}f} ± {error:.{digits}f}"


def gap(own: Sequence[float], base: Sequence[float]) -> str:
  """Returns a difference of means with its error, and the error if paired.

  >>> gap([2.0, 2.1, 2.3], [1.0, 1.1, 1.2])
  '+1.033 ± 0.318 (± 0.143)'
  """
  paired = scipy.stats.ttest_rel(own, base).confidence_interval()
  return f"{interval(own, base)} (± {(paired.high - paired.low) / 2:.3f})"


def _minus(own, base):
  """Returns the cell of a difference; "" without a base, or of the base."""
  return interval(own, base) if base and own != base else ""


def values(name: str, choice: str) -> list[float]:
  """Bits of a choice of a comparison on the validation split, by seed."""
  return rows_of(name, "choice")[choice]["values"]


def repeated() -> Iterator[str]:
  """Random symbols that repeat: the column of the target beside the paper's."""
  name, period = "repeat", 256
  found = record.read(name)
  seen = receptive.fields(found, period)
  titles = (
    "pattern",
    "keys",
    "receptive field",
    "sees the symbol",
    "bits/symbol",
  )
  rows = [titles]
  for row in found["rows"]:
    choice = row["choice"]
    cells = f"`{choice}`", f"{row['keys']:.1f}", *seen[choice]
    rows.append((*cells, interval(row["values"])))
  yield tables.markdown(rows)
  yield records(name)


def _early(found, step):
  """{choice: bits of validation at a step, of each of its runs}."""
  bits: dict[str, list[float]] = {}
  for run in found["runs"]:
    curve = run["curve"]
    at = dict(zip(curve["steps"], curve["bits_per_dim"], strict=True))
    bits.setdefault(run["choice"], []).append(at[step])
  return bits


def far_keys() -> Iterator[str]:
  """Keys that follow the last match, and other far keys, on text."""
  titles = "positions", "in one head of four", "keys", "receptive field"
  titles += f"{EARLY} steps", "600 steps", f"minus `{WINDOWS}`"
  rows = [titles]
  found = record.read(FAR_KEYS)
  for suffix, positions in (("", "rotary"), (LEARNED, "learned")):
    base = values(FAR_KEYS, WINDOWS + suffix)
    for row in found["rows"]:
      if row["choice"].endswith(LEARNED) != bool(suffix):
        continue
      own, cells = row["values"], _far_row(found, row)
      difference = gap(own, base) if own != base else ""
      rows.append((positions, *cells, interval(own), difference))
      positions = ""
  yield tables.markdown(rows)

  exact, near = ("LastMatch(1)", "LastMatch(1, most=128)")
  yield _differences(
    "The exact key minus near matches alone, rotary positions",
    ONE_HEAD.format(exact),
    ONE_HEAD.format(near),
  )
  yield _differences(
    "The exact key minus windows, rotary positions",
    ONE_HEAD.format(exact),
    WINDOWS,
  )
  yield _differences(
    "Near matches alone minus windows, rotary positions",
    ONE_HEAD.format(near),
    WINDOWS,
  )
  yield records(FAR_KEYS, REPEATED)


def _far_row(found, row):
  """The pattern of a row, its keys, its receptive field, and its curve."""
  choice = row["choice"]
  seen = max(x["receptive_field"] for x in _runs(found, choice))
  if "most=" in choice:
    # The record does not know how far back these matches may be.
    config = found["about"]["config"]
    near = re.sub(r"LastMatch\(1, most=(\d+)\)", r"Local(\1)", choice)
    layers = receptive.layers_of(config, near)
    seen = receptive.count(layers, config["data"]["length"])
  early = interval(_early(found, EARLY)[choice], digits=2)
  return _one_head(choice), f"{row['keys']:,.0f}", f"{seen:,}", early


def _differences(about, choice, base):
  """A sentence with a difference by three seeds, by others, and by all."""
  first = [values(FAR_KEYS, x) for x in (choice, base)]
  more = [values(REPEATED, x) for x in (choice, base)]
  both = [x + y for x, y in zip(first, more, strict=True)]
  by_seeds = [gap(*x) for x in (first, more, both)]
  text = "{}: {}; with three other seeds, {}; with all six, {}."
  return textwrap.fill(text.format(about, *by_seeds), 100) + "\n"


def palestrina() -> Iterator[str]:
  """The same on masses, as a sentence."""
  found = record.read(PALESTRINA)
  base = values(PALESTRINA, WINDOWS)
  others = [
    f"{_one_head(row['choice'])} {gap(row['values'], base)}"
    for row in found["rows"]
    if row["values"] != base
  ]
  text = f"`{WINDOWS}` scores {interval(base)}. Minus it: {'; '.join(others)}."
  yield textwrap.fill(text, 100) + "\n"
  yield records(PALESTRINA)


def _one_head(choice):
  """The pattern of the last of four heads, or of all."""
  pattern = choice.removesuffix(LEARNED)
  # The others have the window of the last 128 bytes.
  if match := re.fullmatch(r"\((Local\(128\), ){3}(.*)\),", pattern):
    return f"`{match[2]}`"
  return f"`{pattern}` in all heads"


def _runs(found, choice):
  return [x for x in found["runs"] if x["choice"] == choice]


def found_matches() -> str:
  """How many bytes have a match, how many are far, and how many are right."""
  row = rows_of("baselines_copyright")[COPY_RULE]
  shares = {name: f"{100 * x:.0f} %" for name, x in row["matches"].items()}
  text = (
    f"{shares['found']} of the bytes of the validation split have a match."
    f" {shares['far']} of the"
    f" matches are more than 128 bytes back, and {shares['right']} are followed"
    " by the byte to predict."
  )
  return textwrap.fill(text, 100) + "\n"


def without_networks() -> Iterator[str]:
  """What counts, copies and compressors score on the texts with copies."""
  names = "baselines_copyright", "baselines_palestrina"
  titles = "model", "sees", "copyright files", "test", "Palestrina's masses"
  rows = [(*titles, "test")]
  known = [rows_of(name) for name in names]
  for model in WITHOUT:
    bits = [f"{of[model][x]:.3f}" for of in known for x in SPLITS[::-1]]
    rows.append((model, known[0][model]["sees"], *bits))
  # Only the best pattern of a comparison was scored on the test split.
  copyright_bits, palestrina_bits = _best(FAR_KEYS, REPEATED), _best(PALESTRINA)
  rows.append((*copyright_bits[:1], "", *copyright_bits[1:], "", ""))
  rows.append((*palestrina_bits[:1], "", "", "", *palestrina_bits[1:]))
  yield tables.markdown(rows)
  yield records(*names, FAR_KEYS, REPEATED, PALESTRINA)


def _best(*names):
  """The best pattern of comparisons, its bits of validation and of test."""
  choice = record.read(names[0])["rows"][0]["choice"]
  runs = [run for name in names for run in _runs(record.read(name), choice)]
  bits = (
    interval([run[split]["bits_per_dim"] for run in runs])
    for split in SPLITS[::-1]
  )
  return f"network with {_one_head(choice)}, {len(runs)} seeds", *bits


def columns() -> Iterator[str]:
  """All patterns of the comparisons with the column of the target."""
  titles = "network, budget", "pattern", "keys", "receptive field"
  rows = [(*titles, SEES_ABOVE, "bits/dim", "minus the window")]
  differences = []
  for name, (about, window, pairs) in COLUMNS.items():
    found = record.read(name)
    seen = receptive.fields(found, ABOVE_BACK)
    base = values(name, window) if window else []
    first = about
    for row in found["rows"]:
      choice, own = row["choice"], row["values"]
      cells = f"`{_shown(choice)}`", f"{receptive.keys(found, choice):,.1f}"
      difference = _minus(own, base)
      rows.append((first, *cells, *seen[choice], interval(own), difference))
      first = ""
    for which, (target, papers) in pairs.items():
      found_gap = gap(values(name, papers), values(name, target))
      differences.append(f"{found_gap} ({about}{which})")
  yield tables.markdown(rows)
  text = f"The paper's column minus the target's: {'; '.join(differences)}."
  yield textwrap.fill(text, 100) + "\n"
  yield records(*COLUMNS)


def orders() -> Iterator[str]:
  """Digits in orders that the network is told, and as more images."""
  name, titles = "digits_orders", ("orders", "conditioned", "not conditioned")
  rows = [(*titles, "difference")]
  rows += [("1: upright", interval(values(name, "()")), "", "")]
  rows += [_pair(name, about, *pair) for about, pair in ORDERS.items()]
  yield tables.markdown(rows)
  yield records(name)


def _pair(name, about, *choices):
  """Two choices of a comparison, and the second minus the first."""
  found = [values(name, choice) for choice in choices]
  return about, *map(interval, found), interval(*found[::-1])


def longer() -> Iterator[str]:
  """How patterns rank early and late in training."""
  name, steps = "cifar10_longer", (500, 2000, 6000)
  found = record.read(name)
  early = [_early(found, step) for step in steps]
  seen = receptive.fields(found, ABOVE_BACK)
  titles = "pattern", "keys", "receptive field", SEES_ABOVE
  titles += *(f"{x:,}" for x in steps), "6,000, all images"
  rows = [(*titles, "minus one key")]
  scores = {_pattern(row["choice"]): row["values"] for row in found["rows"]}
  base = scores[_pattern(ABOVE)]
  for row in found["rows"]:
    own = row["values"]
    curve = [interval(x[row["choice"]], digits=2) for x in early]
    difference = _minus(own, base)
    shown = f"`{_shown(row['choice'])}`"
    cells = shown, f"{row['keys']:.1f}", *seen[row["choice"]], *curve
    rows.append((*cells, interval(own), difference))
  yield tables.markdown(rows)
  difference = gap(scores[_pattern(AROUND_ABOVE)], scores[_pattern(COLUMN)])
  yield f"`{AROUND_ABOVE}` minus `{COLUMN}`: {difference}.\n"
  yield records(name)


def _shown(choice):
  """The text of a pattern, with parentheses where & binds before |."""
  return re.sub(r"\| (\w+\([^|]+\) & [^|]+)", r"| (\1)", choice)


def end_to_end() -> Iterator[str]:
  """A step and the bits at equal time, dense and sparse, at three lengths."""
  name = "end_to_end"
  found = record.read(name)
  memory = {
    (x["pattern"], x["length"]): x["bytes"]["total"]
    for x in record.read(MEMORY)["rows"]
  }
  titles = "n", "pattern", "keys", "receptive field", "CPU ms a step"
  titles += "MiB a step", "rate", "steps", "bits/byte", "minus dense"
  rows = [titles]
  for length in (768, 3072, 12288):
    # The best of a length is first.
    ours = [x for x in found["rows"] if f"length={length} " in x["choice"]]
    (dense,) = (x["values"] for x in ours if x["choice"].startswith("dense"))
    for row in ours:
      choice, own = row["choice"], row["values"]
      pattern = choice.split(" with ")[0]
      step = 1000 * row["processor_seconds"] / row["steps"]
      cells = f"{length:,}", f"`{pattern}`", f"{row['keys']:,.0f}"
      cells += f"{row['receptive_field']:,}", f"{step:,.0f}"
      cells += (f"{memory[pattern, length] / 2**20:.0f}",)
      cells += found["tuning"]["best"][choice], f"{row['steps']:,.0f}"
      rows.append((*cells, interval(own), _minus(own, dense)))
  yield tables.markdown(rows)
  yield records(name, MEMORY)


def dense_layers() -> Iterator[str]:
  """How many layers of a network with windows are dense."""
  name = "dense_layers"
  found = record.read(name)
  config = found["about"]["config"]
  seen, num_layers = receptive.fields(found), config["model"]["num_layers"]
  base = values(name, DENSE_LAYERS_WINDOW)
  titles = "dense layers", "keys", "receptive field", "rate", "steps"
  rows = [(*titles, "bits/byte", "minus none")]
  for row in found["rows"]:
    choice, own = row["choice"], row["values"]
    factors = choice.split(", ")
    number = num_layers // len(factors) if factors[-1] == "Causal()" else 0
    cells = f"{number} of {num_layers}", f"{row['keys']:,.0f}", *seen[choice]
    rate = found["tuning"]["best"][choice]
    difference = _minus(own, base)
    steps = f"{row['steps']:,.0f}"
    rows.append((*cells, rate, steps, interval(own), difference))
  yield tables.markdown(rows)
  yield records(name)


def depth() -> Iterator[str]:
  """Layers of a short window beside one key on the byte above, on digits."""
  name = "digits_depth"
  found = record.read(name)
  seen = receptive.fields(found, DIGITS_ABOVE_BACK)
  base = values(name, DIGITS_ONE_KEY)
  titles = "pattern", "layers", "keys", "receptive field", SEES_ABOVE, "rate"
  rows = [(*titles, "bits/dim", "minus one key")]
  for row in found["rows"]:
    choice, own = row["choice"], row["values"]
    pattern, _, num_layers = choice.partition(" with model.num_layers=")
    keys = f"{receptive.keys(found, choice):.1f}"
    cells = f"`{_shown(pattern)}`", num_layers, keys, *seen[choice]
    rate = found["tuning"]["best"][choice]
    difference = _minus(own, base)
    rows.append((*cells, rate, interval(own), difference))
  yield tables.markdown(rows)
  yield records(name)


def _pattern(choice):
  """The pattern of a choice, which may set more, however it is written."""
  return patterns.parse(choice.split(" with ")[0])


def rows_of(name: str, key: str = "model") -> dict[str, dict[str, Any]]:
  """The rows of a record, by default one of baselines, by a value they have."""
  return {row[key]: row for row in record.read(name)["rows"]}


def compressors() -> Iterator[str]:
  """Trained networks beside what is known without one, on both splits."""
  rows, names = [("data", "model", "sees", "test", "validation")], []
  for name, (about, _, (baselines, *models)) in TRAINED.items():
    run = record.read(name)
    scores = [x for x in run["evaluations"] if not x["min_context"]]
    step = next(x["step"] for x in scores if x["split"] == "test")
    found = {x["split"]: x["bits_per_dim"] for x in scores if x["step"] == step}
    bits = (f"{found[x]:.3f}" if x in found else "" for x in SPLITS)
    rows.append((about, f"`{name}`", f"{_seen_bytes(run)} bytes", *bits))
    names += name, f"baselines_{baselines}"
    known = rows_of(names[-1])
    for model in models:
      row = known[model]
      bits = (f"{row[x]:.3f}" for x in SPLITS)
      rows.append(("", model, row["sees"], *bits))
    if name == LARGE:
      sparse = "Sparse Transformer, 59M, as published", "its image"
      rows.append(("", *sparse, PUBLISHED_BITS, ""))
      for model, (score, paper) in PUBLISHED.items():
        link = f"{model}, [as published](https://arxiv.org/abs/{paper})"
        rows.append(("", link, "", score, ""))
  yield tables.markdown(rows)
  yield records(*dict.fromkeys(names))


def _seen_bytes(run):
  """The bytes of the receptive field of a trained run."""
  config = run["config"]
  if config["data"]["name"] == "bytes":
    n = config["data"]["length"]
  else:
    n = run["evaluations"][0]["tokens"] // run["evaluations"][0]["examples"]
  return f"{receptive.count(receptive.layers_of(config), n):,}"


def trained() -> str:
  titles = "config", "data", "pattern", "receptive field"
  titles += "parameters", "trained for"
  rows = [(*titles, "test", "for comparison")]
  for name, (about, pattern, (baselines, *models)) in TRAINED.items():
    run = record.read(name)
    (score, *_) = record.test_scores(run)
    known = rows_of(f"baselines_{baselines}")
    others = [f"{model} {known[model]['test']:.2f}" for model in models]
    if name == LARGE:
      others += [f"{x} {score}" for x, (score, _) in PUBLISHED.items()]
      others += [f"the paper's 59M parameters {PUBLISHED_BITS}"]
    bits = f"{score['bits_per_dim']:.2f} {score['unit']}"
    size = f"{run['parameters'] / 1e6:.1f}M"
    time = f"{_time(run)}, {run['machine']}"
    seen = f"{_seen_bytes(run)} bytes"
    cells = f"`{name}`", about, pattern, seen, size, time
    rows.append((*cells, bits, ", ".join(others)))
  return tables.markdown(rows)


def _time(run):
  """How long a run trained; on CPUs, the sum over all cores."""
  if "cores of" in run["machine"]:
    minutes = max(1, round(run["processor_seconds"] / 60))
    return f"{minutes:,} CPU minute{'s' * (minutes > 1)}"
  return f"{run['seconds'] / 60:.0f} minutes"


def card(name: str) -> str:
  """How the weights of a run were made, and their scores."""
  run, (about, pattern, _) = record.read(name), TRAINED[name]
  size = f"{run['parameters']:,} parameters"
  rows = [("", ""), ("data", about)]
  rows += [("network", f"`configs/{name}.py`: {pattern}, {size}")]
  rows += [("receptive field", f"{_seen_bytes(run)} bytes")]
  # Readers have CIFAR-10 in its default place.
  command = re.sub(r" --config\.data\.(name|path)=\S+", "", run["command"])
  rows += [("command", f"`{command}`")]
  made = run["commit"], run["machine"], _time(run)
  rows += [("commit, machine, time", ", ".join(made))]
  for x in run["evaluations"]:
    if x["step"] == run["steps"]:
      bits = f"{x['bits_per_dim']:.5f}, {x['examples']:,} examples"
      rows += [(f"{x['unit']}, {x['split']}", bits)]
  return tables.markdown(rows)


def records(*names: str) -> str:
  link = "[`{0}`](../benchmarks/results/{0}.json)"
  links = ", ".join(map(link.format, names))
  text = f"Records: {links}."
  return textwrap.fill(text, 100, break_on_hyphens=False)


def commands() -> str:
  """The command, commit and machine of each record that has one command."""
  blocks = []
  for path in sorted(record.FOLDER.glob("*.json")):
    found = record.read(path.stem)
    about = found.get("about", found) if isinstance(found, dict) else {}
    if "command" in about:
      seeds = f", {x} seeds" if (x := about.get("seeds", 1)) > 1 else ""
      made = f"{about['commit']}, {about['machine']}{seeds}"
      blocks.append(f"`{path.stem}`: {made}\n\n    {about['command']}")
    elif isinstance(found, list) and (text := changed(found)):
      blocks.append(f"`{path.stem}`: {text}")
  return "\n\n".join(blocks)


def changed(entries: Sequence[dict[str, Any]]) -> str:
  """How many entries were made from code with uncommitted changes."""
  number = sum(x["commit"].endswith("-dirty") for x in entries)
  if not number:
    return ""
  return (
    f"{number} of {len(entries)} entries were made from code with uncommitted"
    " changes (their commit ends in `-dirty`)."
  )
