"""The reference decode loop, built from the ops: state, round, continuous batching, checks and measurements."""
