"""Formats: how a file is cut into parts, and a part into records that decode to rows."""
