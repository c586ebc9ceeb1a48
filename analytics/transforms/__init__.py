"""Computations on samples: counters' growth, rollups, histograms, usage. DataFrames in, DataFrames out."""
