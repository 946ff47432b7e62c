"""What packs, streams and attention must be, written slowly and plainly: nothing here imports the package."""
