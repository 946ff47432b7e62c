"""Functions and classes that recipes call; they never call a recipe."""
