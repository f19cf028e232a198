"""Models how long kernels take, profiles them, and compares the model with times that others measured."""
