"""Mutants of sources."""
