"""Typed configuration. Nothing here imports torch."""
