// Sets the macros that torch's builds of extensions set. In those builds they hide the operators of half-precision types. Here the
// operators stay, because the headers that define them are included before the macros are set.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define TORCH_EXTENSION_NAME extension
#define TORCH_API_INCLUDE_EXTENSION_H
#define __CUDA_NO_HALF_OPERATORS__
#define __CUDA_NO_HALF_CONVERSIONS__
#define __CUDA_NO_BFLOAT16_CONVERSIONS__
#define __CUDA_NO_HALF2_OPERATORS__
