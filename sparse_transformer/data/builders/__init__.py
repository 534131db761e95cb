"""Builders of tensorflow-datasets that download and write without TensorFlow.

Each is named by the registration of its source, and has one or more archives
in `url_infos`.
"""
