"""The lean body: known architectures run with fewer operations a layer than the library needs."""
