"""Output files of a mapping: who runs where, with whom, and a picture of it."""
