"""Documented, checked fields: of recipes, machine options and the stop condition."""
