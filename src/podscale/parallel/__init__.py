"""What devices do together: distributed batch normalization, collectives, gradient summation, checksums."""
