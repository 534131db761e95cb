"""Builders that prepare data sets with tensorflow-datasets, no TensorFlow."""
