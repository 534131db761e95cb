"""The network, its cache for decoding, and sampling."""
