"""Constraints on responses: JSON schemas, tool calls and templates."""
