"""Known faults of streampack, each a small patch at a public seam; and the search for those that no test sees.

``make mutants`` runs the suite once to learn which tests run which seam, then plants one mutant at a time and runs
those tests. Run it before tests are deleted, and after: a mutant that survives newly blocks the deletion. `registry`
says how one is written, `__main__` is the runner, every other file has the mutants of one area.
"""
