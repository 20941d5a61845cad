"""Studies: train a grid of recipes and seeds, and compare the results in a table and a plot."""
