"""What all formats share: files, parts, lanes, prefetching, and corpora whose files change."""
