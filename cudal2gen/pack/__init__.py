"""Packs: built kernels and their table of choices for one GPU model, for machines without nvcc and CUTLASS.

A pack is a folder, or a wheel that installs one as the package ``cudal2gen_<gpu>``:

- ``pack.json``: what it is for, the ABI that it needs (``abi``), the SHA-256 of every other file, and of itself;
- ``table.json``: kernels and measurements (``choice``); a pack of candidates has none of these;
- ``kernels/<digest>/kernel.cubin`` and ``kernel.launch``, each binary once; ``kernel.ptx`` on request. The cubin is
  that of the build folder without source lines and PTX text (``sass.stripping``): the same code;
- ``libcudal2gen.so``, ``cudal2gen.h`` and ``pack.txt``: the launcher, and the same table for C;
- ``libcudal2gen_torch.so``: the launcher of torch (``torch_launcher.cpp``), for torch 2.10 and newer.

The same records, measurements and compilers give the same bytes. The digests find damage; they are no signature.
"""

from __future__ import annotations

from cudal2gen.pack.contents import contents as contents
from cudal2gen.pack.facts import PackError as PackError
from cudal2gen.pack.reading import Pack as Pack
from cudal2gen.pack.reading import Search as Search
from cudal2gen.pack.reading import installed as installed
from cudal2gen.pack.reading import open_pack as open_pack
from cudal2gen.pack.reading import search as search
from cudal2gen.pack.reading import serving as serving
from cudal2gen.pack.writing import check_target as check_target
from cudal2gen.pack.writing import write_folder as write_folder
from cudal2gen.pack.writing import write_wheel as write_wheel
