"""Translates PTX text to one Python function per kernel, which runs on a batch of threads.

``parser`` makes a ``Module`` (``ptx``) of the text. ``flow`` inlines calls, splits the code into basic blocks and
orders them. ``translate`` writes the function, block by block, by means of ``emitter``. The handlers in
``instructions`` write the text of each instruction.
"""
