"""Costs of large runs, measured at two sizes and extrapolated, and a simulation: ``python -m benchmarks.scale``."""
