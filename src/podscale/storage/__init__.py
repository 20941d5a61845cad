"""Files that are read and written safely."""
