"""Exchanges with a language model. The proposer of records and the author of kernels use the same ones; they differ in
how they write a question and read an answer.

Modules, from the bottom up: ``transcript`` (stored exchanges, from which a restarted run continues), ``completions``
(what servers send), ``server`` (one exchange over the network), ``chat`` (repetition, rests, budget, the transcript),
``answer_text`` (the JSON in an answer), ``conversation`` (a question with its corrections).
"""
