"""A stand-in for SGLang: what our plugin meets, as layers are at 0038b2b5 and hooks at 106f37ce."""
