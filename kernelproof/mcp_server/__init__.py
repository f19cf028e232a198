"""Tools for language models that write CUDA kernels, by the Model Context Protocol: check, explain, count.

``requests`` is what a tool is asked for; ``answers`` compiles and runs it in a process with limits, device code only;
``pages`` has the texts of the rules; ``server`` offers the tools, and alone needs the protocol's SDK.
"""
