"""Each op against the limit of this machine, and estimated rounds on GPUs: `python -m profiling.roofline`."""
