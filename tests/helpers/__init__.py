"""What tests share: tiny runs, laws, references, networks, small data."""
