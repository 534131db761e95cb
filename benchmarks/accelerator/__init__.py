"""Checks and measurements for whoever has a GPU or a TPU; see `__main__`."""
