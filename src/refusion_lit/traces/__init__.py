"""Traces of decodes: save and load, statistics, terminal animation and a self-contained HTML page."""
