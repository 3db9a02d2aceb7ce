"""What users of the ops need to test theirs."""
