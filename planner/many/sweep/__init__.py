"""One plan for each combination of some options."""
