"""A stand-in for SGLang: what our plugin meets, as it is in 0.5.23."""
