"""Pictures of patterns, curves and samples, and HTML pages."""
