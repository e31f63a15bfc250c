"""Formats of products and gradients, applied to the finished model from outside by rules on module names."""
