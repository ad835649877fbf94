"""How little traffic a mapping can have: relaxations, and what meets them."""
