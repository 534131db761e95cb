"""Several devices, and several processes."""
