"""Exchanges with a language model. The proposer of records and the author of kernels use the same ones; they differ in
how they write a question and read an answer.

Modules, from the bottom up: ``transcript`` (the lines that are kept of a run, and what a restarted run takes from them),
``completions`` (what servers send), ``server`` (one exchange over the network), ``chat`` (repetition, rests, budget,
the transcript), ``answer_text`` (the lists in an answer), ``conversation`` (a question with its corrections).
"""
