// The one name that libtorch's CUDA headers mention; the library itself is not called.
#pragma once
#include "cusolver_common.h"
typedef struct cusolverDnContext* cusolverDnHandle_t;
