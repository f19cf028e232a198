"""Runs host code: programs, sessions, and the stand-in CUDA runtime that host launchers run against.

``standin`` is a C library with the functions of the CUDA runtime and driver. It passes every call to the open session.
The ``*_calls`` modules implement the calls, one module per subject, and ``execution`` runs launches.
"""
