"""Use a trained model: inference, and export to other programs."""
