"""What is computed from samples: counters' growth, rollups, histograms, usage. DataFrames in, DataFrames out."""
