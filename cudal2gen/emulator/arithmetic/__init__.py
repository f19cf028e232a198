"""NumPy arithmetic that PTX defines and NumPy does not."""
