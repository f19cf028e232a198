"""From a record to a binary: the catalog of records, the rendered texts, and the build."""
