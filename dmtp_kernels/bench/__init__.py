"""Benchmarks behind `dmtp bench`: each entry against the eager chain, in one run, interleaved, with medians."""
