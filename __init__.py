"""Plans how to train a large model on a GPU cluster, proven optimal within a stated cost model."""
