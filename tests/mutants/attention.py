"""Mutants of attention."""
