"""Device, shared and local memory, and the tags that say which threads touched them last.

Findings about order are made here: every access leaves a tag, and the next access to the same bytes asks the clocks
whether the tagged one happens before it. The model is that of the PTX ISA, "Memory Consistency Model".
"""
