"""Makes tables and figures of the README and docs from records."""
