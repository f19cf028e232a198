"""Profiles of kernels from their machine code: what a profiler would show, predicted without a GPU.

``of_record`` and ``of_cubin`` make one, ``load`` reads one back. ``sections`` and ``html`` print it.
"""

from cudal2gen.timing.profile.comparison import compare as compare
from cudal2gen.timing.profile.cubins import LaunchFacts as LaunchFacts
from cudal2gen.timing.profile.cubins import of_cubin as of_cubin
from cudal2gen.timing.profile.figures import Profile as Profile
from cudal2gen.timing.profile.figures import load as load
from cudal2gen.timing.profile.page import html as html
from cudal2gen.timing.profile.records import brief as brief
from cudal2gen.timing.profile.records import of_record as of_record
from cudal2gen.timing.profile.sections import sections as sections
from kernelproof.ground.pages import Section as Section
