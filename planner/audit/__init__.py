"""A finished plan and its files, checked again without the solver."""
