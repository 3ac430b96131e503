"""Reports: tables of results."""
