"""Pictures of patterns, and of bits by step and position."""
