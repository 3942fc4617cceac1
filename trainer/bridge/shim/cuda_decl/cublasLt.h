// The one name that libtorch's CUDA headers mention; the library itself is not called.
#pragma once
typedef struct cublasLtContext* cublasLtHandle_t;
