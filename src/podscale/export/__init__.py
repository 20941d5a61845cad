"""Use a trained model: inference, and files for other programs."""
