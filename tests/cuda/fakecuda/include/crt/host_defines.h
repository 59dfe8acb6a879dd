/* What cuda_runtime_api.h takes from the CUDA compiler's own header, which pip's packages leave out. */
#ifndef FAKECUDA_HOST_DEFINES_H
#define FAKECUDA_HOST_DEFINES_H
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __align__(n) __attribute__((aligned(n)))
#define __annotate__(a) __attribute__((a))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __constant__
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ inline
#define __global__
#define __host__
#define __location__(a)
#define __managed__
#define __no_return__ __attribute__((noreturn))
#define __noinline__ __attribute__((noinline))
#define __shared__
#endif
