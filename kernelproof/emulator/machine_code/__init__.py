"""Machine code (SASS) as a second form of a kernel: a cubin becomes a module of the emulator's own instructions.

``module.read_cubin`` decodes a cubin by ``kernelproof.sass`` and lowers each instruction to a few PTX instructions
that do the same; everything below the front end, checks included, is shared with PTX. One decorated function under
``instructions`` lowers one mnemonic. An instruction or modifier that nobody has registered is refused by its address.
"""
