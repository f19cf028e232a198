"""Profiles of kernels from their machine code: what a profiler would show, predicted without a GPU.

``load`` reads one back, ``sections`` and ``html`` print it.
"""

from cudal2gen.pages import Section as Section
from cudal2gen.profile.comparison import compare as compare
from cudal2gen.profile.figures import Profile as Profile
from cudal2gen.profile.figures import load as load
from cudal2gen.profile.page import html as html
from cudal2gen.profile.sections import sections as sections
