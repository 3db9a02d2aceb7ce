"""Adapters to engines that others wrote; each is imported only by who uses that engine."""
