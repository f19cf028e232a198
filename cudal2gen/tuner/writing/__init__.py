"""A language model writes kernels: it reads texts with times and machine evidence, answers with texts or patches, and
each is compiled, proven in the emulator and timed before its reward teaches the next answer.

Modules, from the bottom up: ``patches``, ``answers`` (what a reply proposes), ``contract`` (how a text is graded),
``review`` (what its PTX shows a reader), ``proof`` (whether it is right), ``evidence`` (what its machine code shows),
``modelled`` (times without a GPU), ``prompt``, ``session`` (rounds on one problem), ``outcome`` (the winner: a record,
or a proposal in words).
"""
