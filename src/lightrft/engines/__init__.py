"""What generates: one file for each engine, and the small Protocol that they all satisfy."""
