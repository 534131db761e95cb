"""Reports of the costs and the attention of a network."""
