"""Mutants of tokenize."""
