"""All methods of batching on the same data, model and seeds: ``python -m benchmarks.paper``."""
