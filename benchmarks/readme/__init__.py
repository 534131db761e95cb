"""Makes the README's tables and figures from records, and checks its numbers.

`tables` and `evidence` make the parts between markers, `sentences` the pieces
of its text that contain numbers, `figures` its figures. `page` knows where they
are in the text, and finds the numbers that none of them accounts for.
`evidence`, of `comparisons`, `contexts` and `baselines`, is also all of
docs/evidence.md.
"""
