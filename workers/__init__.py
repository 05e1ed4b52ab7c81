"""Computes batches of chunks on one device; knows no request beyond the batch it was given."""
