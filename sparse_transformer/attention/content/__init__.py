"""Content-based patterns."""
