"""The ops: one folder each (or one close family); importing a folder registers its schemas."""
