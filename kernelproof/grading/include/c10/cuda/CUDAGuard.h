// Stands in for torch's header of the same name; see kernelproof_tensor.h.
#include <kernelproof_tensor.h>
