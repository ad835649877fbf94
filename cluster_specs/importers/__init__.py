"""Readers of what other tools say of a cluster: one file per format, joined in `registry`."""
