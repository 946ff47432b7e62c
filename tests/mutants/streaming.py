"""Mutants of streaming."""
