/* The CUDA driver without a GPU: contexts, and the memory that expandable segments are made of. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "gpus.h"

enum { SUCCESS, OUT_OF_MEMORY = 2 };

int cuGetErrorString(int error, const char **text) { *text = "fakecuda"; return SUCCESS; }
int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = gpu_count(); return SUCCESS; }
int cuDeviceGet(int *d, int ordinal) { *d = ordinal; return SUCCESS; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0; *active = 1; return SUCCESS; }
int cuCtxGetCurrent(void **context) { *context = (void *)0x1234; return SUCCESS; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *f, int size, size_t shared) { *blocks = 2; return SUCCESS; }
int cuCtxGetDevice(int *d) { int (*get)(int *) = dlsym(RTLD_DEFAULT, "cudaGetDevice"); return get(d); }
int cuCtxGetLimit(size_t *bytes, int what) { *bytes = 1 << 20; return SUCCESS; }
int cuDeviceGetAttribute(int *value, int what, int d) {
    enum { OVERSIZED_SHARED = 150, VIRTUAL_MEMORY = 102 };
    if (what == OVERSIZED_SHARED || what == VIRTUAL_MEMORY) { *value = what == VIRTUAL_MEMORY; return SUCCESS; }
    int (*get)(int *, int, int) = dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute"); /* the numbers are the runtime's */
    return get(value, what, d);
}
int cuFuncGetAttribute(int *value, int what, void *f) {
    enum { MAX_THREADS = 0, REGISTERS = 4 };
    *value = what == MAX_THREADS ? 1024 : what == REGISTERS ? 64 : 0;
    return SUCCESS;
}
int cuModuleGetFunction(void **f, void *module, const char *name) { *f = (void *)0x5678; return SUCCESS; }
int cuModuleLoadData(void **module, const void *code) { *module = (void *)0x4321; return SUCCESS; }

/* Expandable segments: addresses are reserved, physical memory is made and mapped into them. */

struct location { int type, id; };
struct properties { int type, handle_types; struct location location; };
struct physical { size_t bytes; int device; };

static int asked(const char *name, int d, size_t bytes) {
    int (*function)(int, size_t) = dlsym(RTLD_DEFAULT, name);
    return function(d, bytes);
}

int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int which) { *bytes = 2 << 20; return SUCCESS; }
int cuMemAddressReserve(uintptr_t *start, size_t bytes, size_t alignment, uintptr_t wanted, unsigned long long flags) {
    void *found = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *start = (uintptr_t)found;
    return found == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}
int cuMemAddressFree(uintptr_t start, size_t bytes) { munmap((void *)start, bytes); return SUCCESS; }
int cuMemCreate(struct physical **handle, size_t bytes, const struct properties *properties, unsigned long long flags) {
    if (!asked("fakecuda_take", properties->location.id, bytes)) return OUT_OF_MEMORY;
    *handle = malloc(sizeof **handle);
    **handle = (struct physical){bytes, properties->location.id};
    return SUCCESS;
}
int cuMemRelease(struct physical *handle) {
    asked("fakecuda_give", handle->device, handle->bytes);
    free(handle);
    return SUCCESS;
}
int cuMemMap(uintptr_t start, size_t bytes, size_t offset, void *handle, unsigned long long flags) {
    return mprotect((void *)start, bytes, PROT_READ | PROT_WRITE) ? OUT_OF_MEMORY : SUCCESS;
}
int cuMemUnmap(uintptr_t start, size_t bytes) {
    mmap((void *)start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return SUCCESS;
}

#define NOTHING(name) int name(void) { return SUCCESS; }
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxSetLimit)
NOTHING(cuDevicePrimaryCtxRetain)
NOTHING(cuFileBufDeregister)
NOTHING(cuFileBufRegister)
NOTHING(cuFileHandleDeregister)
NOTHING(cuFileHandleRegister)
NOTHING(cuFileRead)
NOTHING(cuFileWrite)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuLaunchKernel)
NOTHING(cuLaunchKernelEx)
NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete)
NOTHING(cuLinkCreate_v2)
NOTHING(cuMemExportToShareableHandle)
NOTHING(cuMemGetAddressRange)
NOTHING(cuMemGetAllocationPropertiesFromHandle)
NOTHING(cuMemGetHandleForAddressRange)
NOTHING(cuMemImportFromShareableHandle)
NOTHING(cuMemRetainAllocationHandle)
NOTHING(cuMemSetAccess)
NOTHING(cuMemsetD32Async)
NOTHING(cuModuleLoad)
NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload)
NOTHING(cuMulticastAddDevice)
NOTHING(cuMulticastBindMem)
NOTHING(cuMulticastCreate)
NOTHING(cuMulticastUnbind)
NOTHING(cuOccupancyMaxActiveClusters)
NOTHING(cuPointerGetAttribute)
NOTHING(cuStreamWriteValue32)
NOTHING(cuTensorMapEncodeIm2col)
NOTHING(cuTensorMapEncodeTiled)
