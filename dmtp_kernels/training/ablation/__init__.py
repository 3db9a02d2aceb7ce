"""Every method of the source, trained on the same data and budget from both starts and on two seeds, and measured."""
