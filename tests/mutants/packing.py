"""Mutants of packing."""
