"""Fields of recipes, machine options and the stop condition: read, checked, documented."""
