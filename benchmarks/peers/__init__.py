"""Other cost models on the same measured runs: `python -m benchmarks.peers`."""
