"""A server of the Model Context Protocol for language models that write CUDA kernels. Its tools: check, explain, count.

``requests`` validates what a client asks for. ``answers`` compiles and runs the device code of a request in a child
process with limits; host code never runs. ``pages`` reads the documentation of rules. ``server`` offers the tools; it
is the only module that needs the protocol's SDK.
"""
