/* The CUDA runtime without a GPU: memory is reserved address space, kernels do nothing, copies are memcpy.

   Every device has its own range of addresses, and hands out the lowest hole in it that is large enough, in steps of
   2 MiB, as drivers do. Work is done when it is asked for, so streams and events have nothing to wait for; an event
   remembers when it was recorded, and the time between two of them is the host's. What a stream is asked for while it
   is captured is done whenever the graph is launched, which counts as one launch. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

#include "gpus.h"

/* The header renames these to versions of them; torch's libraries ask for either. */
#undef cudaEventElapsedTime
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

typedef cudaError_t E;

enum { MOST_DEVICES = 16, MOST_SEGMENTS = 1 << 16 };
#define PAGE (2ull << 20)
#define RANGE (1ull << 40)
#define COPIED (1ull << 14) /* what is moved of a copy at most: numbers mean nothing here, and pages stay untouched */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;

static struct { long mallocs, launches, copies, to_host, synchronisations, pinned; } counts;

/* Copies what was counted since the process began: see tests/cuda/gpu.py. */
void fakecuda_counts(long *out) { memcpy(out, &counts, sizeof counts); }

static int calls_to = -1;

/* Writes kernels, copies and calls of libraries to a file from now on, or no longer (-1): a name and numbers a line. */
void fakecuda_write_calls(int file) { calls_to = file; }

int fakecuda_called(const char *name, int a, int b, int c, int d, int e) {
    if (calls_to >= 0) dprintf(calls_to, "%s %d %d %d %d %d\n", name, a, b, c, d, e);
    return 0;
}

static int is_traced(void) {
    static int traced = -1;
    if (traced < 0) traced = getenv("FAKE_GPU_TRACE") != NULL;
    return traced;
}

/* Memory of the devices. */

struct segment { char *start; size_t bytes; };
static struct device { char *base; size_t used; int count; struct segment segments[MOST_SEGMENTS]; } devices[MOST_DEVICES];

static size_t in_pages(size_t bytes) { return (bytes + PAGE - 1) & ~(PAGE - 1); }

static char *base_of(int d) {
    static char *all;
    if (!all) {
        all = mmap(NULL, RANGE * MOST_DEVICES + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        all = (char *)in_pages((uintptr_t)all);
    }
    return all + d * RANGE;
}

/* Also what the driver's own calls for memory go by: see driver.c. */
int fakecuda_take(int d, size_t bytes) {
    pthread_mutex_lock(&mutex);
    int fits = devices[d].used + bytes <= gpu_bytes();
    if (fits) devices[d].used += bytes;
    pthread_mutex_unlock(&mutex);
    return fits;
}

void fakecuda_give(int d, size_t bytes) {
    pthread_mutex_lock(&mutex);
    devices[d].used -= bytes;
    pthread_mutex_unlock(&mutex);
}

E cudaMalloc(void **p, size_t bytes) {
    if (!fakecuda_take(current, bytes)) return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&mutex);
    struct device *device = &devices[current];
    char *hole = base_of(current);
    int at = 0;
    for (; at < device->count && device->segments[at].start < hole + in_pages(bytes); at++)
        hole = device->segments[at].start + in_pages(device->segments[at].bytes);
    memmove(&device->segments[at + 1], &device->segments[at], (device->count++ - at) * sizeof(struct segment));
    device->segments[at] = (struct segment){hole, bytes};
    mprotect(hole, in_pages(bytes), PROT_READ | PROT_WRITE);
    counts.mallocs++;
    if (is_traced()) fprintf(stderr, "fakecuda: device %d takes %zu bytes\n", current, bytes);
    pthread_mutex_unlock(&mutex);
    *p = hole;
    return cudaSuccess;
}

static int device_of(const void *p) {
    char *base = base_of(0);
    return (const char *)p >= base && (const char *)p < base + RANGE * MOST_DEVICES ? ((const char *)p - base) / RANGE : -1;
}

E cudaFree(void *p) {
    int d = device_of(p);
    if (d < 0) return cudaSuccess;
    pthread_mutex_lock(&mutex);
    struct device *device = &devices[d];
    for (int at = 0; at < device->count; at++) {
        struct segment found = device->segments[at];
        if (found.start != p) continue;
        mmap(p, in_pages(found.bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        memmove(&device->segments[at], &device->segments[at + 1], (--device->count - at) * sizeof found);
        device->used -= found.bytes;
        if (is_traced()) fprintf(stderr, "fakecuda: device %d gives %zu bytes\n", d, found.bytes);
        break;
    }
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

E cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = gpu_bytes();
    *free_bytes = *total_bytes - devices[current].used;
    return cudaSuccess;
}

/* Pinned memory of the host. */

static struct segment pinned[MOST_SEGMENTS];
static int pinned_count;

E cudaHostRegister(void *p, size_t bytes, unsigned flags) {
    pthread_mutex_lock(&mutex);
    pinned[pinned_count++] = (struct segment){p, bytes};
    counts.pinned++;
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

E cudaHostUnregister(void *p) {
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < pinned_count; i++)
        if (pinned[i].start == p) { pinned[i] = pinned[--pinned_count]; break; }
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

E cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
    return posix_memalign(p, 4096, bytes) ? cudaErrorMemoryAllocation : cudaHostRegister(*p, bytes, 0);
}

E cudaFreeHost(void *p) {
    cudaHostUnregister(p);
    free(p);
    return cudaSuccess;
}

E cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *p) {
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeUnregistered;
    int d = device_of(p);
    if (d >= 0) {
        found->type = cudaMemoryTypeDevice;
        found->device = d;
        found->devicePointer = (void *)p;
    }
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < pinned_count; i++)
        if ((char *)p >= pinned[i].start && (char *)p < pinned[i].start + pinned[i].bytes) {
            found->type = cudaMemoryTypeHost;
            found->hostPointer = found->devicePointer = (void *)p;
        }
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

/* What the devices are. */

E cudaGetDeviceCount(int *count) { *count = gpu_count(); return cudaSuccess; }
E cudaGetDevice(int *d) { *d = current; return cudaSuccess; }
E cudaSetDevice(int d) {
    if (d < 0 || d >= gpu_count()) return cudaErrorInvalidDevice;
    current = d;
    return cudaSuccess;
}
E cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
E cudaDeviceCanAccessPeer(int *can, int d, int peer) { *can = 0; return cudaSuccess; }

E cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int d) {
    switch ((int)what) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: case cudaDevAttrTotalConstantMemory: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMultiProcessorCount: *value = gpu()->multiprocessors; break;
    case cudaDevAttrL2CacheSize: *value = gpu()->l2_mib << 20; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = gpu()->architecture % 10 ? 1536 : 2048; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (gpu()->shared_kib + 1) << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = gpu()->shared_kib << 10; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrComputeCapabilityMajor: *value = gpu()->architecture / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = gpu()->architecture % 10; break;
    default: *value = 1;
    }
    return cudaSuccess;
}

E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, gpu()->name);
    p->totalGlobalMem = gpu_bytes();
    p->major = gpu()->architecture / 10;
    p->minor = gpu()->architecture % 10;
    p->multiProcessorCount = gpu()->multiprocessors;
    p->l2CacheSize = gpu()->l2_mib << 20;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = gpu()->shared_kib << 10;
    p->sharedMemPerMultiprocessor = (gpu()->shared_kib + 1) << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
    p->warpSize = p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsPerMultiProcessor = gpu()->architecture % 10 ? 1536 : 2048;
    p->textureAlignment = 512;
    p->asyncEngineCount = 3;
    p->memoryBusWidth = gpu()->bus_bits;
    p->unifiedAddressing = p->concurrentKernels = p->managedMemory = p->cooperativeLaunch = 1;
    return cudaSuccess;
}

/* Streams and events. */

static void *handle(void) {
    static uintptr_t next = 0x10000;
    return (void *)__sync_add_and_fetch(&next, 64);
}

/* Graphs of kernels: of what is captured, copies are done again, and kernels are counted. */

struct node { void *to; const void *from; size_t bytes; int byte; enum { KERNEL, COPY, SET } kind; };
struct CUgraph_st { struct node *nodes; size_t count; };
enum { MOST_CAPTURES = 16 };
static struct capture { cudaStream_t stream; struct CUgraph_st *graph; pthread_t thread; int spoilt; unsigned long long id; }
    captures[MOST_CAPTURES];

static struct capture *capture_of(cudaStream_t s) {
    for (int i = 0; s && i < MOST_CAPTURES; i++)
        if (captures[i].graph && captures[i].stream == s) return &captures[i];
    return NULL;
}

/* Notes what a stream that is captured is asked for; 0 if it is not captured. */
static int noted(cudaStream_t s, struct node node) {
    struct capture *capture = capture_of(s);
    if (!capture) return 0;
    struct CUgraph_st *graph = capture->graph;
    graph->nodes = realloc(graph->nodes, (graph->count + 1) * sizeof node);
    graph->nodes[graph->count++] = node;
    return 1;
}

E cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    static unsigned long long next = 0;
    if (!s || capture_of(s)) return cudaErrorStreamCaptureUnsupported; /* the default stream cannot be captured */
    pthread_mutex_lock(&mutex);
    struct capture *capture = captures;
    while (capture->graph) capture++;
    *capture = (struct capture){s, calloc(1, sizeof(struct CUgraph_st)), pthread_self(), 0, ++next};
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}
E cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    struct capture *capture = capture_of(s);
    *graph = NULL;
    if (!capture || !pthread_equal(capture->thread, pthread_self())) return cudaErrorStreamCaptureWrongThread;
    if (!capture->spoilt) *graph = capture->graph;
    capture->graph = NULL;
    return capture->spoilt ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}
E cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    struct capture *capture = capture_of(s);
    *status = !capture ? cudaStreamCaptureStatusNone
              : capture->spoilt ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
E cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                           const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    struct capture *capture = capture_of(s);
    cudaStreamIsCapturing(s, status);
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? capture->graph : NULL;
    if (nodes) *nodes = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}
E cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    struct CUgraph_st *copy = calloc(1, sizeof *copy);
    copy->count = graph->count;
    copy->nodes = malloc(graph->count * sizeof *graph->nodes);
    memcpy(copy->nodes, graph->nodes, graph->count * sizeof *graph->nodes);
    *made = (cudaGraphExec_t)copy;
    return cudaSuccess;
}
E cudaGraphDestroy(cudaGraph_t graph) {
    if (graph) free(graph->nodes);
    free(graph);
    return cudaSuccess;
}
E cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaGraphDestroy((cudaGraph_t)graph); }
E cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { *count = graph->count; return cudaSuccess; }
E cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
    struct CUgraph_st *graph = (struct CUgraph_st *)exec;
    counts.launches++;
    for (size_t i = 0; i < graph->count; i++) {
        struct node *node = &graph->nodes[i];
        if (node->kind == COPY) memmove(node->to, node->from, node->bytes < COPIED ? node->bytes : COPIED);
        if (node->kind == SET) memset(node->to, node->byte, node->bytes < COPIED ? node->bytes : COPIED);
    }
    return cudaSuccess;
}

/* To wait for what is captured is an error, and spoils it. */
static E waited(struct capture *capture) {
    counts.synchronisations += !capture;
    if (capture) capture->spoilt = 1;
    return capture ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
E cudaDeviceSynchronize(void) {
    for (int i = 0; i < MOST_CAPTURES; i++)
        if (captures[i].graph) return waited(&captures[i]);
    return waited(NULL);
}
E cudaStreamSynchronize(cudaStream_t s) { return waited(capture_of(s)); }
E cudaEventSynchronize(cudaEvent_t e) { return waited(NULL); }

E cudaGetLastError(void) { return cudaSuccess; }
E cudaPeekAtLastError(void) { return cudaSuccess; }
E cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
E cudaStreamCreate(cudaStream_t *s) { *s = handle(); return cudaSuccess; }
E cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { *s = handle(); return cudaSuccess; }
E cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { *s = handle(); return cudaSuccess; }
E cudaStreamDestroy(cudaStream_t s) { return cudaSuccess; }
E cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return cudaSuccess; }
E cudaStreamQuery(cudaStream_t s) { return cudaSuccess; }
E cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return cudaSuccess; }
E cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
E cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void *data) { function(data); return cudaSuccess; }
E cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t function, void *data, unsigned flags) {
    function(s, cudaSuccess, data);
    return cudaSuccess;
}

E cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = calloc(1, sizeof(struct timespec)); return cudaSuccess; }
E cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
E cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
E cudaEventRecord(cudaEvent_t e, cudaStream_t s) { clock_gettime(CLOCK_MONOTONIC, (struct timespec *)e); return cudaSuccess; }
E cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaEventRecord(e, s); }
E cudaEventQuery(cudaEvent_t e) { return cudaSuccess; }
E cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    struct timespec *a = (struct timespec *)begin, *b = (struct timespec *)end;
    *milliseconds = 1e3 * (b->tv_sec - a->tv_sec) + 1e-6 * (b->tv_nsec - a->tv_nsec);
    return cudaSuccess;
}

/* Copies. */

static E copied(void *to, const void *from, size_t bytes, cudaStream_t s) {
    fakecuda_called("copy", bytes, device_of(to), device_of(from), 0, 0);
    if (noted(s, (struct node){to, from, bytes, 0, COPY})) return cudaSuccess;
    counts.copies++;
    if (device_of(from) >= 0 && device_of(to) < 0) counts.to_host++;
    memcpy(to, from, bytes < COPIED ? bytes : COPIED);
    return cudaSuccess;
}
E cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) { return copied(to, from, bytes, NULL); }
E cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
    return copied(to, from, bytes, s);
}
E cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, cudaStream_t s) {
    return copied(to, from, bytes, s);
}
E cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, enum cudaMemcpyKind kind) {
    return cudaSuccess;
}
E cudaGetSymbolAddress(void **p, const void *symbol) {
    static char place[1 << 16];
    *p = place;
    return cudaSuccess;
}
E cudaMemset(void *p, int byte, size_t bytes) {
    fakecuda_called("set", bytes, byte, 0, 0, 0);
    memset(p, byte, bytes < COPIED ? bytes : COPIED);
    return cudaSuccess;
}
E cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t s) {
    return noted(s, (struct node){p, NULL, bytes, byte, SET}) ? cudaSuccess : cudaMemset(p, byte, bytes);
}

/* Kernels, by the names that they were registered with. */

enum { MOST_KERNELS = 1 << 18 };
static struct { const void *f; const char *name; } kernels[MOST_KERNELS];

static size_t place_of(const void *f) {
    size_t at = (uintptr_t)f / 16 % MOST_KERNELS;
    while (kernels[at].f && kernels[at].f != f) at = (at + 1) % MOST_KERNELS;
    return at;
}
void __cudaRegisterFunction(void **fat, const char *f, char *device_f, const char *name, int limit, uint3 *thread, uint3 *block,
                            dim3 *block_size, dim3 *grid_size, int *warp_size) {
    size_t at = place_of(f);
    kernels[at].f = f, kernels[at].name = name;
}

static E launched(const void *f, dim3 grid, dim3 block, cudaStream_t s) {
    const char *name = kernels[place_of(f)].name;
    fakecuda_called(name ? name : "kernel", grid.x, grid.y, grid.z, block.x, block.y);
    if (!noted(s, (struct node){.kind = KERNEL})) counts.launches++;
    return cudaSuccess;
}
E cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return launched(f, grid, block, s);
}
E __cudaLaunchKernel(void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return launched(f, grid, block, s);
}
E cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **args) {
    return launched(f, config->gridDim, config->blockDim, config->stream);
}
E cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return launched(f, grid, block, s);
}
E __cudaGetKernel(void **kernel, const void *f) { *kernel = (void *)f; return cudaSuccess; }

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configured;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configured.grid = grid, configured.block = block, configured.shared = shared, configured.stream = stream;
    return 0;
}
E __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configured.grid, *block = configured.block, *shared = configured.shared, *(void **)stream = configured.stream;
    return cudaSuccess;
}

E cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *f) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 64;
    int architecture = gpu()->architecture;
    found->binaryVersion = found->ptxVersion = architecture == 89 ? 86 : architecture; /* torch has no code for 89 */
    return cudaSuccess;
}
E cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute what, int value) { return cudaSuccess; }
E cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute what, int value, int d) { return cudaSuccess; }
E cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **jit_values, unsigned jits,
                      enum cudaLibraryOption *options, void **values, unsigned count) {
    *library = handle();
    return cudaSuccess;
}
E cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) { *kernel = handle(); return cudaSuccess; }
E cudaLibraryUnload(cudaLibrary_t library) { return cudaSuccess; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int size, size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int size, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, f, size, shared, 0);
}

/* The driver, for what torch asks of it by name. */

E cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                   enum cudaDriverEntryPointQueryResult *result) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    *function = dlsym(driver, name);
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
