"""Synthetic questions and answers (report section 2.5), made in seven steps over JSONL.

seeds, generate, format, schema, unique, clean, compose: each counts what it leaves out, and goes on where a
killed run stopped.
"""
