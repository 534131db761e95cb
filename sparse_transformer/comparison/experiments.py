"""The experiments of several configs."""

from collections.abc import Iterable, Iterator

from ml_collections import ConfigDict

from sparse_transformer import data
from sparse_transformer.training.experiment import Experiment


def make(configs: Iterable[ConfigDict]) -> Iterator[Experiment]:
  """Makes experiments, of which those with the same data read them once."""
  sources: dict[str, data.Source] = {}
  for config in configs:
    experiment = Experiment(config)
    settings = config.data.to_json(sort_keys=True)
    # In place of the source that the experiment would make of its own.
    vars(experiment)["source"] = sources.setdefault(settings, experiment.source)
    yield experiment
