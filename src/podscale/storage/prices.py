"""What requests to a bucket cost. A cloud's own list of prices is what counts: they differ by region and change."""

READ_USD = 0.40  # per million reads
LISTING_USD = 5.00  # per million listings and writes
PRICES = "S3 Standard, us-east-1, November 2026"  # where and when these hold
