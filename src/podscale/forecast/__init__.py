"""Forecast: how fast a recipe would train on a pod that is not here, and the real compiler's word on its program."""
