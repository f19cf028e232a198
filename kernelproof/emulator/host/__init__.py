"""The host side: programs, sessions, and the stand-in CUDA runtime that host launchers run against.

``standin`` is a C library with the functions of the CUDA runtime and driver. It hands every call to the session that is
open; the ``*_calls`` modules answer by subject, and ``execution`` runs launches.
"""
