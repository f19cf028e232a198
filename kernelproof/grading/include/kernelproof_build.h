// Defines the macros that torch defines when it builds an extension, for sources that test them. Torch's builds lack the operators of
// half-precision types, which these macros hide. Here a source has the operators, because their headers are included first.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define TORCH_EXTENSION_NAME extension
#define TORCH_API_INCLUDE_EXTENSION_H
#define __CUDA_NO_HALF_OPERATORS__
#define __CUDA_NO_HALF_CONVERSIONS__
#define __CUDA_NO_BFLOAT16_CONVERSIONS__
#define __CUDA_NO_HALF2_OPERATORS__
