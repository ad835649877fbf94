"""Placements with less traffic under a cap on the balance."""
