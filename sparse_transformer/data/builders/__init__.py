"""tensorflow-datasets builders that download and write without TensorFlow.

Each is named where its source is registered, and lists its archives in
`url_infos`.
"""
