"""Predicts profiles of kernels from their machine code: what a profiler would show, without a GPU.

``of_cubin`` makes the profile of a cubin's kernel and ``load`` reads a saved one. ``sections`` gives it as text and
tables, ``html`` as a page, and ``compare`` puts two profiles side by side.
"""

from kernelproof.ground.pages import Section as Section
from kernelproof.profile.comparison import compare as compare
from kernelproof.profile.cubins import LaunchFacts as LaunchFacts
from kernelproof.profile.cubins import of_cubin as of_cubin
from kernelproof.profile.figures import Profile as Profile
from kernelproof.profile.figures import load as load
from kernelproof.profile.page import html as html
from kernelproof.profile.sections import sections as sections
