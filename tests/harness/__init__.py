"""What tests, stress and benchmarks run with: corpora, generators, ranks, stores that fail, tiny models."""
