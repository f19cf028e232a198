// Stands in for torch's header of this name; see kernelproof_tensor.h.
#include <kernelproof_tensor.h>
