"""One cluster, many models: which job gets how many nodes, which ones, and when."""
