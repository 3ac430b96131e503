"""Helpers without a domain: files and option checks."""
