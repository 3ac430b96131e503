"""Research extras: they import the core and are never imported by it. See README.md in this folder."""
