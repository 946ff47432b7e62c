"""Reports: of a corpus before training, printed, as a page or as JSON; and of a run, as a page."""
