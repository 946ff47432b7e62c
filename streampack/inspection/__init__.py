"""What packing will do to a corpus, before it is trained on: one report, printed, as a page or as JSON."""
