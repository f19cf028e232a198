"""Serves the tools check, explain and count to language models that write CUDA kernels, by the Model Context Protocol.

``requests`` validates the requests of a client. ``answers`` compiles and runs the device code of a request in a child
process with limits; host code never runs. ``pages`` reads the documentation of rules. ``server`` offers the tools; it
is the only module that needs the protocol's SDK.
"""
