"""Every field of an experiment: the library's defaults.

Units and ranges: docs/config.md. The presets of published
experiments name the source of each field, with the words of docs/paper.md.
"""

from sparse_transformer.config import get_config as get_config
