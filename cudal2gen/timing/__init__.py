"""Modelled times of kernels, and how well they predict what GPUs measured."""
