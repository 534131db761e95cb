"""Makes tables and figures of the README and docs from records.

`tables` makes the parts of pages between markers, `evidence` all of
docs/evidence.md, and `figures` the figures; `records` reads the records.
"""
