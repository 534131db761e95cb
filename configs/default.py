"""All fields of an experiment, with the defaults of the library.

docs/config.md lists the meaning, the unit and the range of each field. In the
presets of published experiments, a comment names the source of each value.
docs/paper.md defines these sources.
"""

from sparse_transformer.config import get_config as get_config
