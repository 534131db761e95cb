"""Reports of a network's costs and attention; nothing here trains it."""
