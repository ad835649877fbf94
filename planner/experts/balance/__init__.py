"""Placements that are even, and how even any could be."""
