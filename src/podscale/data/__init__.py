"""From bytes on disk to uint8 batches on the devices: index, sample order, crop boxes, decoding, loader."""
