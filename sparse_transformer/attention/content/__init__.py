"""Patterns that follow the content, and learned spans."""
