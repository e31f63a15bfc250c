"""Synthetic questions and answers (report section 2.5), made in seven steps.

Seeds, generate, format, schema, unique, clean, compose: every step reads and writes JSONL, counts what it leaves out, and goes on where a killed run stopped.
"""
