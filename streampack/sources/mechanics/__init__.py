"""Code that all file formats share: files, parts, lanes, prefetching, and corpora that gain and lose files."""
