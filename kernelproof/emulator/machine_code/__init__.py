"""Executes machine code (SASS): lowers a cubin to PTX instructions, which the emulator executes.

``module.read_cubin`` decodes a cubin by ``kernelproof.sass`` and lowers each instruction to a few PTX instructions that
do the same. Everything below the front end, checks included, is shared with PTX. One decorated function under
``instructions`` lowers one mnemonic. An instruction or modifier that is not registered is refused, with its address.
"""
