"""What a mapping sends over each level and cut of the fabric."""
