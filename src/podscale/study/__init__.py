"""Study: one question asked of many trainings. A grid of recipes and seeds, what came of it, a table and a plot."""
