"""Makes tables and figures of the README and docs from records.

`tables` makes the parts of pages between markers, with those of
docs/evidence.md in `evidence`, and `figures` the figures.
"""
