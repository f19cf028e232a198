"""Predicts profiles of kernels from their machine code: what a profiler would show, without a GPU.

``of_cubin`` makes the profile of a cubin's kernel, for the launch that ``LaunchFacts`` describes, and ``load`` reads a
saved one. ``sections`` gives a profile as text and tables, ``html`` as a page, and ``compare`` puts two profiles side
by side.

To build another kind of profile, create the classes of the module ``figures``. ``steady_window`` cuts a settled part,
the ``LoopWindow``, out of a simulated main loop; ``Listing`` gives its lines and its figures; ``occupancy`` says how
many CTAs an SM holds; ``advice`` says what would make the kernel faster; and ``compose`` puts the parts together into a
``Profile``. Other packages import only the names in ``__all__``; of the submodules, only ``advice`` and ``figures`` are
among them.
"""

from kernelproof.ground.pages import Section
from kernelproof.profile import advice, figures
from kernelproof.profile.comparison import compare
from kernelproof.profile.composition import compose
from kernelproof.profile.cubins import LaunchFacts, of_cubin
from kernelproof.profile.figures import Advice, Occupancy, Profile, load
from kernelproof.profile.loop import ISSUE_PORT, Listing, LoopWindow, steady_window
from kernelproof.profile.occupancy import occupancy
from kernelproof.profile.page import html
from kernelproof.profile.rates import LAUNCH_US, l2_share
from kernelproof.profile.sections import loop_words, sections

__all__ = [
    "ISSUE_PORT",
    "LAUNCH_US",
    "Advice",
    "LaunchFacts",
    "Listing",
    "LoopWindow",
    "Occupancy",
    "Profile",
    "Section",
    "advice",
    "compare",
    "compose",
    "figures",
    "html",
    "l2_share",
    "load",
    "loop_words",
    "occupancy",
    "of_cubin",
    "sections",
    "steady_window",
]
