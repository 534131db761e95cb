"""Writes a self-contained HTML page about a run.

python -m sparse_transformer.report --workdir=runs/digits

Writes report.html into the workdir: results, curves, throughput, patterns,
heads, samples, bits by position, config. It shows what is in the workdir:
`eval.py` and `python -m sparse_transformer.sample` add to that, and so does
`python -m sparse_transformer.explain` with --example.
"""

import json
import pathlib
from collections.abc import Sequence

from sparse_transformer import atomic, cli
from sparse_transformer.cli import flags
from sparse_transformer.figures import curves, html

COLUMNS = "split", "step", "min_context", "weights"  # of an evaluation


def _make(workdir, experiment):
  """The page about a run, as HTML."""
  from sparse_transformer.training import metrics

  lines = metrics.read(workdir) if (workdir / "metrics.jsonl").exists() else []
  name, settings = workdir.resolve().name, experiment.config.to_dict()
  sections = (
    _summary(name, experiment, lines),
    _evaluations(workdir),
    _curves(experiment.source.unit, experiment.model, lines),
    *_pictures(workdir),
    _samples(workdir),
    html.section("Config", html.preformatted(json.dumps(settings, indent=2))),
  )
  return html.page(f"Run {name}", *sections)


def _summary(name, experiment, lines):
  from sparse_transformer import model as model_lib
  from sparse_transformer.comparison.plan import LIMIT
  from sparse_transformer.training.explanation import costs

  config, source = experiment.config, experiment.source
  network, steps = experiment.model, config.train.steps
  of_all = f" of {steps:,}" if steps < LIMIT - 1 else ""  # no time limit
  last = max((line["step"] for line in lines), default=0)
  used = "; ".join(
    f"{pattern} after {step:,} steps" if step else pattern
    for step, pattern in model_lib.schedule(config).items()
  )
  rows = [
    ("run", name),
    ("data", f"{config.data.name}, {source.length:,} positions"),
    ("network", f"{network.num_layers} layers, width {network.width}"),
    ("parameters", f"{model_lib.count_parameters(network):,}"),
    *_experts(network, lines),
    *_spans(network, lines),
    ("FLOPs per token", f"{costs.flops_per_token(config, network):,.0f}"),
    ("attention", f"{used}, {config.attention.mode}"),
    ("step", f"{last:,}{of_all}"),
  ]
  for split in ("train", "validation"):
    for line in [line for line in lines if line["split"] == split][-1:]:
      bits = f"{line['bits_per_dim']:.4f} {source.unit}{_accuracy(line)}"
      rows.append((f"last {split}", f"{bits}, step {line['step']:,}"))
  if shares := [line["mfu"] for line in lines if "mfu" in line]:
    rows.append((curves.SPEEDS["mfu"], f"{100 * shares[-1]:.1f} %"))
  return html.table(rows)


def _accuracy(values):
  return f", accuracy {values['accuracy']:.4f}" if "accuracy" in values else ""


def _experts(network, lines):
  """Rows on the experts of a network, if it has any."""
  from sparse_transformer import model as model_lib
  from sparse_transformer.model.experts import PER_TOKEN

  if not network.experts:
    return
  active = model_lib.count_active_parameters(network)
  number = f"{PER_TOKEN} of {network.experts}"
  yield "experts", f"{number} for each token, {active:,} active parameters"
  loads = [line["expert_load"] for line in lines if "expert_load" in line]
  blocks = model_lib.layers_of(network, "expert_blocks")
  for block, load in zip(blocks, loads[-1] if loads else (), strict=False):
    shares = " ".join(f"{x:.2f}" for x in load)
    yield f"last load, block {block}", f"{shares} of the mean"


def _spans(network, lines):
  """Rows on the learned spans of a network, if it has any."""
  for layer, spans in _last_spans(network, lines).items():
    shown = " ".join(f"{x:.1f}" for x in spans)
    yield f"last spans, layer {layer}, in positions", shown


def _last_spans(network, lines):
  """{layer: the spans of its heads} at the last step that was logged."""
  from sparse_transformer.attention.content.spans import any_span

  logged = [line["spans"] for line in lines if "spans" in line]
  layers = [i for i, heads in enumerate(network.patterns) if any_span(heads)]
  # With another pattern than in training, there may be other layers.
  last = logged[-1] if logged else []
  return (
    dict(zip(layers, last, strict=False)) if len(last) == len(layers) else {}
  )


def _evaluations(workdir):
  """The results of eval.py, with its pictures."""
  paths = sorted((workdir / "evaluations").glob("*.json"))
  if not paths:
    return html.section("Evaluation", html.note("None: run eval.py."))
  titles = (*COLUMNS, "bits", "standard error", "tokens", "overrides")
  rows = sorted(map(_evaluation, paths), key=lambda row: row[-1] != "")
  table = html.table([titles, *rows])  # of the run itself first
  pictures = [
    html.picture(picture, f"bits by position, {path.stem}")
    for path in paths
    if (picture := path.with_suffix(".png")).exists()
  ]
  return html.section("Evaluation", table, *pictures)


def _evaluation(path):
  """The cells of a result."""
  try:
    result = atomic.read_json(path)
    bits, error = result["bits_per_dim"], result["standard_error"]
    overrides = result.get("overrides", {}).items()
    shown = "-" if bits is None else f"{bits:.4f} {result['unit']}"
    shown += _accuracy(result)
    if "bits_per_byte" in result:
      shown += f", {result['bits_per_byte']:.4f} bits/byte"
    return (
      *(result[column] for column in COLUMNS),
      shown,
      "-" if error is None else f"{error:.4f}",
      f"{result['tokens']:,}",
      ", ".join(f"{name}={value}" for name, value in overrides),
    )
  except (ValueError, TypeError, KeyError, AttributeError):
    raise ValueError(
      f"{path} is damaged; delete it and run eval.py again"
    ) from None


def _curves(unit, network, lines):
  if not lines:
    return html.section("Curves", html.note("No metrics yet."))
  bits = curves.bits_by_step(lines, unit)
  parts = [html.figure(bits, "training and validation bits by step")]
  for field, name in curves.SPEEDS.items():
    if any(field in line for line in lines):
      parts.append(html.figure(curves.speed_by_step(lines, field), name))
  if spans := _last_spans(network, lines):
    figure = curves.spans_by_layer(spans)
    parts.append(html.figure(figure, "learned spans by layer and head"))
  return html.section("Curves", *parts)


def _pictures(workdir):
  """The patterns, and the heads that `explain --example` has drawn."""
  path = workdir / "patterns.png"
  if path.exists():
    yield html.section("Patterns", html.picture(path, "attention patterns"))
  paths = list((workdir / "attention").glob("layer_*.png"))
  paths.sort(key=lambda path: (len(path.name), path.name))  # layer 2 before 10
  if paths:
    shown = [html.picture(path, f"heads, {path.stem}") for path in paths]
    yield html.section("Heads on an example", *shown)


def _samples(workdir):
  from sparse_transformer.training.evaluation import samples

  path = workdir / "samples.png"
  if path.exists():
    sides = html.note("Sampled images on the left, real ones on the right.")
    return html.section("Samples", html.picture(path, "samples"), sides)
  for path in (workdir / "samples.txt", workdir / "samples.fasta"):
    if path.is_file() and path.stat().st_size:
      text = samples.read_text(path)  # HTML allows no control characters
      return html.section("Samples", html.preformatted(text))
  return html.section(
    "Samples", html.note("None: run python -m sparse_transformer.sample.")
  )


def main(argv: Sequence[str]) -> None:
  """Writes the page of the run in --workdir."""
  from sparse_transformer.training.evaluation.trained_run import open_run

  workdir = pathlib.Path(flags.FLAGS.workdir)
  experiment, checkpoints = open_run(workdir, flags.FLAGS.config)
  checkpoints.find(None)  # there must be one
  path = workdir / "report.html"
  path.write_text(_make(workdir, experiment))
  print(f"report in {path}")


if __name__ == "__main__":
  cli.run(main, cli.on_workdir)
