"""From a record to a binary: the catalog of records, their texts, and the build."""
