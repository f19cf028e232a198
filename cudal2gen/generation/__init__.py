"""Turns records into binaries: the catalog of records, the rendered texts, and the build."""
