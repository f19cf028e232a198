#include <cudal2gen_tensor.h>
