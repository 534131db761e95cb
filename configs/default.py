"""Every field of an experiment: the library's defaults.

The fields, with their units and sources, are in `sparse_transformer/config.py`.
"""

from sparse_transformer.config import get_config as get_config
