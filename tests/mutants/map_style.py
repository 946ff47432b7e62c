"""Mutants of map_style."""
