"""Routing that was measured, and placements, in the files of those who use them."""
