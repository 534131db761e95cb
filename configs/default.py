"""Every field of an experiment: the library's defaults.

Units and sources: `sparse_transformer/config.py`.
"""

from sparse_transformer.config import get_config as get_config
