"""Writes and reads packs, which bring built kernels to machines without nvcc and CUTLASS.

A pack has the kernels of one GPU model and the table that chooses among them. It is a folder, or a wheel that installs
one as the package ``cudal2gen_<gpu>``:

- ``pack.json`` states the GPU model, the ABI that the pack needs (``abi``), and the SHA-256 of every other file and of
  its own text;
- ``table.json`` lists the kernels and their measurements (``results.choice``); a pack of candidates has kernels only;
- ``kernels/<digest>/`` holds each binary once, as ``kernel.cubin`` and ``kernel.launch``, and on request
  ``kernel.ptx``. The cubin has the code of the build folder's, without source lines and PTX text (``sass.stripping``);
- ``libcudal2gen.so``, ``cudal2gen.h`` and ``pack.txt`` are the launcher and the same table for C programs;
- ``libcudal2gen_torch.so`` launches from torch 2.10 and newer without Python (``torch_launcher.cpp``).

The same records, measurements and compilers give the same bytes. The digests detect damage; they are no signature.
"""

from __future__ import annotations

from cudal2gen.pack.contents import contents as contents
from cudal2gen.pack.facts import PackError as PackError
from cudal2gen.pack.reading import Pack as Pack
from cudal2gen.pack.reading import PackSearch as PackSearch
from cudal2gen.pack.reading import installed as installed
from cudal2gen.pack.reading import open_pack as open_pack
from cudal2gen.pack.reading import search as search
from cudal2gen.pack.reading import serving as serving
from cudal2gen.pack.writing import check_target as check_target
from cudal2gen.pack.writing import write_folder as write_folder
from cudal2gen.pack.writing import write_wheel as write_wheel
