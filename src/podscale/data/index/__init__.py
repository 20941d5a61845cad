"""What images there are: containers, the catalog of scanned data sets, and their tables."""
