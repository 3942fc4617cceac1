// The one name that libtorch's CUDA headers mention; the library itself is not called.
#pragma once
typedef enum { CUSOLVER_STATUS_SUCCESS = 0 } cusolverStatus_t;
