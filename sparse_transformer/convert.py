"""Makes a run from a file of exported or released weights.

python -m sparse_transformer.convert FILE.safetensors --workdir=runs/converted

All commands can read the run. Its only checkpoint is at step 0. The command
does not train, and needs no data. An exported file contains its config. For a
.npz released by Jun et al. 2020, the config is the file in configs/ with the
same number of layers. --config=FILE sets another config. Flags can override
config fields. For example, --config.data.path=DIR names the folder in which
later commands find the data. A .npz contains averaged and raw weights; the
averaged ones are read unless the file is given as FILE.npz:params.
"""

import pathlib
import sys
import tempfile
from collections.abc import Sequence

from sparse_transformer import cli, schema
from sparse_transformer.cli import config_flags, flags


def main(argv: Sequence[str]) -> None:
  """Makes a run at step 0 from a file of weights."""
  args = flags.FLAGS
  if len(argv) != 2:
    raise ValueError("give one file of weights; see --help")
  if not args.workdir or pathlib.Path(args.workdir).exists():
    raise ValueError(f"--workdir={args.workdir or ''} must name a new folder")
  schema.typed(args.config)
  # If there is a config file, the run keeps a copy of it.
  config = None
  config_file = None
  if args["config"].present:
    config = schema.typed(args.config)
    config_file = config_flags.get_config_filename(args["config"])
  # These imports load JAX, so mistakes in flags are reported before them.
  from sparse_transformer.training import banner, workdir as workdir_lib

  workdir_lib.check_folder(args.workdir, workdir_lib.COMPARISON, "a comparison")

  text = str(pathlib.Path(argv[1]))
  experiment = _experiment(text, config, cli.overrides())
  start = _write(experiment, pathlib.Path(args.workdir), config_file)
  print(banner.origin(start))
  print(banner.end(experiment, args.workdir, config_file))


def run_of(file: str) -> str:
  """Returns the run made from a file of weights, making it if necessary.

  Args:
    file: the path of the file.

  Returns:
    The folder of the run, runs/NAME-CRC32.

  Raises:
    ValueError: the file does not contain weights, or is damaged.
    OSError: the folder cannot be written.
  """
  from sparse_transformer.data import files

  path = pathlib.Path(file)
  folder = pathlib.Path("runs", f"{path.stem}-{files.crc32(path):08x}")
  if folder.exists():
    return str(folder)

  experiment = _experiment(file)
  folder.parent.mkdir(exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder.parent) as new:
    run = pathlib.Path(new, "run")
    _write(experiment, run)
    try:
      run.rename(folder)
    except OSError:
      # Another process may have made the same folder in the meantime.
      if not folder.exists():
        raise
  print(f"{file} is now the run {folder}", file=sys.stderr)
  return str(folder)


def _experiment(text, config=None, overrides=None):
  """Returns the experiment of a run that starts from a file of weights.

  Args:
    text: the file, as in `train.init_from`.
    config: the config of the experiment. By default, this is the config in an
      exported file, or the preset of the reader of a released file.
    overrides: {"group.field": value}, applied to the default config only.
  """
  from sparse_transformer.training.checkpoints import exported, foreign
  from sparse_transformer.training.experiment import Experiment

  file = None
  if reader := foreign.reader(text):
    config = config or reader.preset(text).replace(**overrides or {})
    config = reader.with_its_data(config)
  elif text.endswith(exported.SUFFIX):
    file = exported.load(text)
    config = config or file.config.replace(**overrides or {})
  else:
    raise ValueError(
      f"{text} must be a file of weights, {foreign.SUFFIXES}; see --help"
    )

  changes = {"train.init_from": text, "train.steps": 0}
  experiment = Experiment(config.replace(**changes))
  # The size of images is that of the data or, without data, that recorded in
  # the file of weights.
  try:
    _ = experiment.source
  except FileNotFoundError:
    experiment = Experiment(experiment.config, shared=file and file.source)
  return experiment


def _write(experiment, workdir, config_file=None):
  """Writes a run of 0 steps: a checkpoint, metrics and the config.

  Args:
    experiment: the experiment. Its `train.init_from` names the file.
    workdir: a new folder.
    config_file: a config file to copy into the workdir, or None.

  Returns:
    The description of the weights, see `warm_start.first_state`.
  """
  from sparse_transformer.training import loop, metrics, warm_start
  from sparse_transformer.training.checkpoints import store

  state, start = warm_start.first_state(experiment)
  assert start  # `train.init_from` is set, so the weights have a description
  provenance = store.provenance(
    experiment.config, experiment.source, has_data=False
  )

  with (
    store.Saver(workdir, keep=1, provenance=provenance) as saver,
    metrics.Writer(workdir, -1) as writer,
  ):
    saver.save(state, start.get("bits"))
    writer.write(0, "start", **start)
  loop.write_run(experiment, workdir, config_file)
  return start


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of the new run.")
  cli.run(main, cli.on_file, takes_words=True)
