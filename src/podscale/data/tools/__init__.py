"""Tools for data sets: check, survey, prepare."""
