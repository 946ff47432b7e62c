"""What recipes call: plain functions and objects that never call the loop back."""
