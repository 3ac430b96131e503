"""Constraints: JSON schemas, calls of tools and templates that responses follow."""
