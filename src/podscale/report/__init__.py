"""Reports of a run: text for a terminal (`terminal`) and HTML pages (`page`, `compare`)."""
