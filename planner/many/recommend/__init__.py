"""How many GPUs, and of which cluster: the fewest or cheapest that reach a target."""
