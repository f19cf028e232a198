"""PTX text is parsed, analysed and translated to one Python function per kernel, which runs on a batch of threads.

The way of a kernel: ``parser`` makes a ``Module`` of the text (``ptx``); ``flow`` inlines calls, cuts basic blocks and
orders them; ``translate`` writes the function, block by block, with the help of ``emitter``; each instruction's part is
written by its handler in ``instructions``.
"""
