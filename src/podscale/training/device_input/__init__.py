"""Input on the devices: augmentation, and images that live there."""
