"""What the kernels move, use and reach: proofs and measurements that need no GPU, and those that do."""
