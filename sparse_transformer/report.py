"""A page about a run, that stands alone.

python -m sparse_transformer.report --workdir=runs/digits

Writes report.html into the workdir: results, curves, throughput, patterns,
samples, bits by position, config. It shows what is there: `eval.py` and
`python -m sparse_transformer.sample` add to it.
"""

import json
import pathlib

from absl import flags

from sparse_transformer import cli
from sparse_transformer.figures import html as pages, plots
from sparse_transformer.model import transformer as model_lib
from sparse_transformer.training import checkpoint, metrics
from sparse_transformer.training.experiment import Experiment


def make(workdir, config):
  """The page, HTML, of a run."""
  workdir = pathlib.Path(workdir)
  lines = metrics.read(workdir) if (workdir / "metrics.jsonl").exists() else []
  sections = (
    _summary(workdir, config, lines),
    _evaluations(workdir),
    _curves(config, lines),
    _pictures(workdir),
    _samples(workdir),
    _config(config),
  )
  return pages.page(f"Run {workdir.resolve().name}", *filter(None, sections))


def _summary(workdir, config, lines):
  experiment = Experiment(config)
  network, source = experiment.model, experiment.source
  last = max((line["step"] for line in lines), default=0)
  rows = [
    ("data", f"{config.data.name}, {source.length:,} positions"),
    ("network", f"{network.num_layers} layers, width {network.width}"),
    ("parameters", f"{model_lib.count_parameters(network):,}"),
    ("attention", f"{config.attention.pattern}, {config.attention.mode}"),
    ("step", f"{last:,} of {config.train.steps:,}"),
  ]
  for split in ("train", "validation"):
    known = [line for line in lines if line["split"] == split]
    if known:
      value = f"{known[-1]['bits_per_dim']:.4f} {source.unit}"
      rows.append((f"last {split}", f"{value}, step {known[-1]['step']:,}"))
  return pages.table([("run", str(workdir.resolve().name)), *rows])


def _evaluations(workdir):
  """What eval.py found, with its pictures."""
  paths = sorted((workdir / "evaluations").glob("*.json"))
  if not paths:
    return pages.section("Evaluation", pages.note("None: run eval.py."))
  rows, parts = [("split", "step", "min_context", "weights", "bits")], []
  rows[0] += "standard error", "tokens"
  for path in paths:
    found = json.loads(path.read_text())
    error = found["standard_error"]
    rows.append(
      (
        *(found[k] for k in ("split", "step", "min_context", "weights")),
        f"{found['bits_per_dim']:.4f} {found['unit']}",
        "" if error is None else f"{error:.4f}",
        f"{found['tokens']:,}",
      )
    )
    picture = path.with_suffix(".png")
    if picture.exists():
      parts.append(pages.picture(picture, f"bits by position, {path.stem}"))
  return pages.section("Evaluation", pages.table(rows), *parts)


def _curves(config, lines):
  if not lines:
    return pages.section("Curves", pages.note("No metrics yet."))
  unit = Experiment(config).source.unit
  bits = plots.curves({"": lines}, unit)
  parts = [pages.figure(bits, "bits of train and validation by step")]
  if any("tokens_per_second" in line for line in lines):
    parts.append(pages.figure(plots.throughput(lines), "tokens per second"))
  return pages.section("Curves", *parts)


def _pictures(workdir):
  path = workdir / "patterns.png"
  if path.exists():
    return pages.section("Patterns", pages.picture(path, "attention patterns"))
  return None


def _samples(workdir):
  path = workdir / "samples.png"
  if path.exists():
    parts = (
      pages.picture(path, "samples"),
      pages.note("Left drawn, right real."),
    )
    return pages.section("Samples", *parts)
  for path in (workdir / "samples.txt", workdir / "samples.fasta"):
    if path.exists():
      text = path.read_bytes()[:4000].decode(errors="replace")
      # What browsers refuse, as they would show it.
      shown = "".join(
        c if c.isprintable() or c in "\n\t" else "�" for c in text
      )
      return pages.section("Samples", pages.preformatted(shown))
  return pages.section(
    "Samples", pages.note("None: run python -m sparse_transformer.sample.")
  )


def _config(config):
  text = json.dumps(config.to_dict(), indent=2)
  return pages.section("Config", pages.preformatted(text))


def main(argv):
  cli.check_arguments(argv)
  args = flags.FLAGS
  with checkpoint.Checkpoints(args.workdir) as checkpoints:
    if not checkpoints.steps():
      raise FileNotFoundError(
        f"{args.workdir} has no checkpoint yet; train it first"
      )
  path = pathlib.Path(args.workdir) / "report.html"
  path.write_text(make(args.workdir, args.config))
  print(f"report in {path}")


if __name__ == "__main__":
  cli.run_on_workdir(main)
