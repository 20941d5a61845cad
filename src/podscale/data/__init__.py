"""From bytes on disk to uint8 batches on the devices: index, order, decode, loader, augment."""
