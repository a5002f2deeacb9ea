"""Measuring what speculation gains, against plain decoding of the same model in the same run."""
