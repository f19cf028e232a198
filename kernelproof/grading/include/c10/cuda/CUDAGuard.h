// Stands in for the header of torch of this name; see kernelproof_tensor.h.
#include <kernelproof_tensor.h>
