"""The tuner: proposers suggest records, an environment evaluates them, and some proposers learn from the trials.

From the bottom up: ``environment`` and ``on_gpu`` (evaluation), ``reward``, ``features``, ``network``, ``policy`` and
``checkpoint``, ``proposal`` and ``proposers``, ``executor``, ``search`` (one problem), ``language_model`` (exchanges),
``campaign`` (many problems, and the catalog), ``benchmark`` (comparison of proposers), ``writing`` (a language model
writes kernels).
"""
