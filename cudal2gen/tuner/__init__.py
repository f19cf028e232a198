"""The tuner: proposers suggest records, an environment evaluates them, and a cost model learns from the trials.

From the bottom up: ``environment`` and ``on_gpu`` (evaluation), ``reward``, ``proposal`` and ``proposers``,
``cost_model`` and ``training``, ``executor``, ``search`` (one problem), ``language_model`` (exchanges), ``campaign``
(many problems, and the catalog), ``benchmark`` (comparison of proposers), ``writing`` (a model writes kernels).
"""
