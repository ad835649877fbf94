"""Layout and mapping chosen together: what a price sees of a mapping, and which mappings have it."""
