"""Plans whose pipeline runs through parts of a cluster that differ in device, node or network."""
