"""Writes a self-contained HTML page about a run.

python -m sparse_transformer.report --workdir=runs/digits

Writes report.html into the workdir. The page shows how the run was made, its
results, curves, patterns, heads, samples and bits by position, and its config.
It contains only what is already in the workdir. To add evaluations, samples or
heads, first run `eval.py`, `python -m sparse_transformer.sample`, or `python -m
sparse_transformer.explain` with --example.
"""

import base64
import datetime
import html
import io
import pathlib
from collections.abc import Sequence

from sparse_transformer import atomic, cli, config as config_lib, data, schema
from sparse_transformer.cli import flags
from sparse_transformer.data import text as text_lib
from sparse_transformer.figures import curves

# Wide tables and pictures scroll within their own box, so that the page itself
# never scrolls sideways.
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b2733; margin: 2rem auto;
  max-width: 76rem; padding: 0 .75rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
h1, pre, td { overflow-wrap: break-word; }
img { max-width: 100%; vertical-align: top; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
td, th { padding: .2rem .8rem .2rem 0; vertical-align: top; text-align: left;
  border-bottom: 1px solid #dde; font-variant-numeric: tabular-nums; }
td { max-width: 48rem; } pre, table { font-size: 14px; }
pre { background: #f4f6f9; padding: .75rem; white-space: pre-wrap; }
@media (max-width: 50rem) {
  td { max-width: 60vw; } .wide img { max-width: none; max-height: 24rem; } }
"""


def main(argv: Sequence[str]) -> None:
  """Writes the page of the run in --workdir."""
  from sparse_transformer.training import metrics
  from sparse_transformer.training.experiment import open_run

  workdir = pathlib.Path(flags.FLAGS.workdir)
  run = open_run(workdir, cli.overrides())
  run.changes(config_lib.TO_RESUME)  # rejects overrides that change results
  experiment = run.experiment

  step = run.step
  lines = metrics.read(workdir) if (workdir / "metrics.jsonl").exists() else []
  changes = config_lib.read_changes(workdir)
  saved = run.saved.describe(step)

  made = _known(saved, "command", "begun", "commit", "machine")
  trained = _trained(experiment, step, saved, lines, changes)
  summary = _summary(experiment, saved, lines)
  heads = _heads(workdir) + _origin(workdir / "attention" / "attention.json")
  sections = {
    "Run": _table((), [*made, ("trained", trained), *summary]),
    "Changes": _changes(changes),
    "Evaluation": _evaluations(workdir),
    "Curves": _curves(experiment, lines),
    "Patterns": _wide(_picture(workdir / "patterns.png")),
    "Heads on an example": heads,
    "Samples": _samples(workdir) + _origin(workdir / "samples.json"),
    "Config": _config(experiment.config),
  }

  path = workdir / "report.html"
  atomic.write_text(path, _page(workdir.resolve().name, sections))
  print(f"report in {path}")


def _page(name, sections):
  """Returns the HTML page of a run, without sections that are empty."""
  title = html.escape(f"Run {name}")
  body = "\n".join(f"<h2>{x}</h2>\n{y}" for x, y in sections.items() if y)
  return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><style>{STYLE}</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""


def _summary(experiment, saved, lines):
  """Returns table rows about a run: its data, network and last losses."""
  from sparse_transformer import model as model_lib
  from sparse_transformer.training import costs

  config = experiment.config
  source = experiment.source
  network = experiment.model
  rows = [
    ("data", _data(saved)),
    ("positions", f"{source.length:,}"),
    ("network", f"{network.num_layers} layers, width {network.width}"),
    ("parameters", f"{model_lib.count_parameters(network):,}"),
    ("FLOPs per token", f"{costs.flops_per_token(network)['total']:,.0f}"),
    ("attention", f"{config.attention.pattern}, {config.attention.mode}"),
  ]

  # Later lines replace earlier ones, so the last line of each split remains.
  last = {line["split"]: line for line in lines}
  for split in "train", "validation":
    if line := last.get(split):
      bits = f"{line['bits_per_dim']:.4f} {source.unit}{_accuracy(line)}"
      rows.append((f"last {split}", f"{bits}, step {line['step']:,}"))
  if mfu := last.get("train", {}).get("mfu"):
    rows.append(("model-FLOPs utilization", f"{100 * mfu:.1f} %"))
  return rows


def _data(saved):
  """Describes a run's data: its name, path, sizes and checksum.

  For example 'bytes, a.txt, 840 symbols, splits 756 + 42 + 42, crc32 1a2b3c4d'.
  """
  config = saved["config"]["data"]
  parts = [config["name"], config["path"]]
  for name, value in (saved.get("data") or {}).items():
    if isinstance(value, int):
      parts.append(f"{value:,} {name}")
    elif name == "splits":
      parts.append("splits " + " + ".join(f"{size:,}" for size in value))
    else:
      parts.append(f"{name} {value}")
  return ", ".join(filter(None, parts))


def _trained(experiment, step, saved, lines, changes):
  """Describes how long a run was trained.

  For example '700 steps, 716,800 tokens, 8.0 epochs, 0:01:44, CPU time
  0:03:07'.

  Args:
    experiment: the run's experiment.
    step: the step of the checkpoint.
    saved: the description of the checkpoint.
    lines: the lines of metrics.jsonl.
    changes: (step, {field: (before, since)}) for each step at which the run was
      resumed with other settings.
  """
  if not step:
    return experiment.stage(step)

  sequences = step * experiment.config.train.batch_size
  for changed_at, fields in changes:
    if changed_at < step and "train.batch_size" in fields:
      # Steps before the change had a different batch size.
      before, since = fields["train.batch_size"]
      sequences += changed_at * (before - since)

  length = experiment.model.length
  tokens = sequences * length
  parts = [f"{step:,} steps", f"{tokens:,} tokens"]

  number = saved.get("examples")
  if number:
    size = number * length
    # In a stream, an example starts at each symbol, so examples overlap.
    if isinstance(experiment.source, data.Stream):
      size = number + length - 1
    parts.append(f"{tokens / size:,.2f} epochs")

  timed = [line for line in lines if "processor_seconds" in line]
  for name, label in ("seconds", ""), ("processor_seconds", "CPU time "):
    if timed:
      seconds = round(timed[-1][name])
      parts.append(f"{label}{datetime.timedelta(seconds=seconds)}")
  return ", ".join(parts)


def _accuracy(values):
  """Returns ", accuracy 0.9876", or "" if the values include no accuracy."""
  return f", accuracy {values['accuracy']:.4f}" if "accuracy" in values else ""


def _changes(changes):
  """Returns a table of settings that changed on resuming; "" if none did."""
  rows = []
  for step, fields in changes:
    for name, values in fields.items():
      rows.append((f"{step:,}", name, *map(repr, values)))
  return rows and _table(("after step", "field", "before", "since"), rows)


def _evaluations(workdir):
  """Returns a table of all scores of the run, and their bits by position."""
  paths = sorted((workdir / "evaluations").glob("*.json"))
  if not paths:
    return _text("None: run eval.py.")

  rows = [_evaluation(path) for path in paths]
  # Scores without overrides come first.
  rows.sort(key=lambda row: row["overrides"] != "")
  parts = [_table(rows[0], [row.values() for row in rows])]
  for path in paths:
    parts.append(_picture(path.with_suffix(".png")))
  return "\n".join(parts)


def _evaluation(path):
  """Returns {title: cell} for the score in a file.

  Raises ValueError if the file is damaged.
  """
  try:
    result = atomic.read_json(path)
    # The bits are None if no position was scored.
    bits = result["bits_per_dim"]
    error = result["standard_error"]
    score = "-" if bits is None else f"{bits:.4f} {result['unit']}"
    score += _accuracy(result)
    if "bits_per_byte" in result:
      score += f", {result['bits_per_byte']:.4f} bits/byte"
    overrides = result.get("overrides", {}).items()
    return {
      "split": result["split"],
      "step": result["step"],
      "min_context": result["min_context"],
      "weights": result["weights"],
      "bits": score,
      "standard error": "-" if error is None else f"{error:.4f}",
      "tokens": f"{result['tokens']:,}",
      "overrides": ", ".join(f"{name}={value}" for name, value in overrides),
      "command": result.get("command", ""),
    }
  except (ValueError, TypeError, KeyError, AttributeError):
    raise ValueError(
      f"{path} is damaged; delete it and run eval.py again"
    ) from None


def _curves(experiment, lines):
  """Returns a plot of training and validation bits by step."""
  if not lines:
    return _text("No metrics yet.")
  figure = curves.bits_by_step(lines, experiment.source.unit)
  figure.savefig(file := io.BytesIO(), format="png")
  return _image(file.getvalue(), "training and validation bits by step")


def _heads(workdir):
  """Returns the pictures of what heads attend to, one per layer."""
  paths = list((workdir / "attention").glob("layer_*.png"))
  # Sort by length first, so that layer 2 precedes layer 10.
  paths.sort(key=lambda path: (len(path.name), path.name))
  return "\n".join(_wide(_picture(path)) for path in paths)


def _samples(workdir):
  """Returns the last samples: a picture, text, or the names of audio files."""
  from sparse_transformer.training.evaluation import samples

  if picture := _picture(workdir / "samples.png"):
    return picture
  for path in (workdir / "samples.txt", workdir / "samples.fasta"):
    if path.is_file() and path.stat().st_size:
      # `read_text` escapes control characters, which HTML does not allow.
      text = samples.read_text(path)
      return "\n".join(map(_text, text.split(text_lib.RULE.decode())))

  sounds = ", ".join(sorted(x.name for x in workdir.glob("samples_*.wav")))
  return _text(sounds or "None: run python -m sparse_transformer.sample.")


def _config(config):
  """Returns a table of fields that differ from their defaults.

  The other fields follow in a table that is initially collapsed.
  """
  defaults = schema.flatten(schema.Config())
  changed = []
  unchanged = []
  for name, value in schema.flatten(config).items():
    # Compare text, because 1, 1.0 and True are equal in Python but are
    # different settings.
    if repr(value) == repr(defaults[name]):
      unchanged.append((name, repr(value)))
    else:
      changed.append((name, repr(value), repr(defaults[name])))

  table = _table(("field", "value", "default"), changed)
  folded = "<summary>Fields with their defaults</summary>"
  folded += _table(("field", "value"), unchanged)
  return f"{table}<details>{folded}</details>"


def _origin(path):
  """Returns a table of how samples or pictures were made, from JSON."""
  origin = atomic.read_json(path, dict) if path.exists() else {}
  rows = _known(origin, "step", "command")
  return _table((), rows) if rows else ""


def _known(values, *names):
  """Returns a table row for each name that has a value."""
  return [(x, values[x]) for x in names if values.get(x) not in (None, "")]


def _text(text):
  """Returns preformatted text."""
  return f"<pre>{html.escape(text)}</pre>"


def _table(titles, rows):
  """Returns an HTML table; the text of its cells is escaped."""
  lines = [_table_row("th", titles)]
  for row in rows:
    lines.append(_table_row("td", row))
  return _wide("<table>\n" + "\n".join(lines) + "\n</table>")


def _table_row(tag, cells):
  """Returns a row of an HTML table, with cells of tag "th" or "td"."""
  texts = [html.escape(str(cell)) for cell in cells]
  return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts)


def _wide(part):
  """Puts a part that may be wider than the page into a box that scrolls."""
  return part and f'<div class="wide">{part}</div>'


def _picture(path):
  """Returns an image tag with the contents of a PNG file, or "" if absent."""
  if not path.exists():
    return ""
  atomic.size(path)  # raises ValueError for a pipe, which might never end
  return _image(path.read_bytes(), path.stem)


def _image(data, text):
  """Returns an image tag that contains the bytes of a PNG file."""
  encoded = base64.b64encode(data).decode()
  # Embed the picture, so that the page is a single file that can be sent.
  source = f"data:image/png;base64,{encoded}"
  return f'<img alt="{html.escape(text)}" src="{source}">'


if __name__ == "__main__":
  cli.run(main, cli.on_workdir)
