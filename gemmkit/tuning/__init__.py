"""Choosing mappings: defaults by operator and size."""
