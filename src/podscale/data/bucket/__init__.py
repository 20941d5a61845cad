"""Samples from a bucket: which ranges to request, fetching ahead of the loader, and the cache on disk."""
