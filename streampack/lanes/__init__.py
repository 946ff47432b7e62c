"""Lanes: each reads, encodes, plans and assembles its part of the data into packs, and resumes from a state."""
