#include <kernelproof_tensor.h>
