"""Content-based patterns, and learned spans."""
