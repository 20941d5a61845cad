"""A model of time: how fast a recipe would train on a pod, whether or not the pod is available."""
