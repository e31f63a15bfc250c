"""Functions of tensors: the torch reference first, faster twins as rows of `ops/table.py`."""
