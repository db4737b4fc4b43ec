"""What the benchmarks of memory share: what is kept, real runs, trials by hand."""
