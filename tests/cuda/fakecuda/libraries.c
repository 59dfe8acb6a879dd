/* cuBLAS, cuDNN and NCCL without a GPU: what torch reads back from them. All else of them does nothing; the launcher adds that.

   cuDNN's descriptors go by attributes; of those that torch's frontend reads back, an execution plan's workspace is
   FAKE_CUDNN_WORKSPACE bytes, and every other number 0. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static void *handle(void) {
    static uintptr_t next = 0x5000000;
    return (void *)__sync_add_and_fetch(&next, 256);
}

#define MAKES(name) int name(void **made) { *made = handle(); return 0; }
#define GIVES(name, type, value) int name(void *of, type *found) { *found = value; return 0; }

MAKES(cublasCreate_v2)
GIVES(cublasGetMathMode, int, 0)
GIVES(cublasGetPointerMode_v2, int, 0)
size_t cublasLtGetVersion(void) { return 130000; }
MAKES(cublasLtMatmulDescCreate)
MAKES(cublasLtMatmulPreferenceCreate)
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *made = handle();
    return fakecuda_called("cublasLtMatrixLayoutCreate", type, rows, columns, leading, 0);
}
int cublasLtMatmulAlgoGetHeuristic(void *lt, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    enum { RESULT_BYTES = 96 }; /* cublasLtMatmulHeuristicResult_t: no workspace, and success */
    memset(results, 0, RESULT_BYTES);
    *found = 1;
    return 0;
}

size_t cudnnGetVersion(void) {
    const char *version = getenv("FAKE_CUDNN_VERSION");
    return version ? atol(version) : 92400;
}
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int error) { return "fakecuda"; }
void cudnnGetLastErrorString(char *text, size_t bytes) { if (bytes) *text = 0; }
MAKES(cudnnCreate)
MAKES(cudnnCreateActivationDescriptor)
MAKES(cudnnCreateCTCLossDescriptor)
MAKES(cudnnCreateConvolutionDescriptor)
MAKES(cudnnCreateDropoutDescriptor)
MAKES(cudnnCreateFilterDescriptor)
MAKES(cudnnCreatePoolingDescriptor)
MAKES(cudnnCreateSpatialTransformerDescriptor)
int cudnnBackendCreateDescriptor(int type, void **made) { *made = handle(); return 0; }
int cudnnBackendGetAttribute(void *descriptor, int attribute, int type, int64_t wanted, int64_t *found, void *values) {
    enum { INT64 = 3, NUMERICAL_NOTE = 11, BEHAVIOR_NOTE = 19, PLAN_WORKSPACE_SIZE = 402 }; /* of cudnn_graph.h */
    const char *workspace = getenv("FAKE_CUDNN_WORKSPACE");
    if (found) *found = type != NUMERICAL_NOTE && type != BEHAVIOR_NOTE;
    if (type == INT64 && values && wanted > 0)
        *(int64_t *)values = attribute == PLAN_WORKSPACE_SIZE && workspace ? atoll(workspace) : 0;
    return 0;
}
GIVES(cudnnDropoutGetStatesSize, size_t, 2 << 20)
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int operations, void *activation, void *x,
                                                         size_t *bytes) { *bytes = 0; return 0; }
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int operations, void *x, void *z, void *y,
                                                             void *bn, void *activation, size_t *bytes) {
    *bytes = 0;
    return 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int operations, void *x, void *y, void *dy, void *dz,
                                                      void *dx, void *dbn, void *activation, size_t *bytes) {
    *bytes = 0;
    return 0;
}

/* Recurrent layers. Where weights lie is what torch asserts: gate after gate, the rest as cuDNN's guide has it, all
   matrices before all biases. What is kept for the backward is not known: gates, a state and an output for each step
   of each layer, or FAKE_CUDNN_RESERVE bytes. */
struct rnn { int mode, directions, type, input, hidden, projected, layers; };
struct data { int steps, batch; };
struct tensor { int sizes[3]; };
#define MAKES_A(name, kind) \
    int cudnnCreate##name(struct kind **made) { *made = calloc(1, sizeof **made); return 0; } \
    int cudnnDestroy##name(struct kind *made) { free(made); return 0; }
MAKES_A(RNNDescriptor, rnn)
MAKES_A(RNNDataDescriptor, data)
MAKES_A(TensorDescriptor, tensor)

int cudnnSetRNNDescriptor_v8(struct rnn *of, int algorithm, int mode, int biases, int bidirectional, int input_mode, int type,
                             int precision, int math, int input, int hidden, int projected, int layers, void *dropout,
                             unsigned flags) {
    *of = (struct rnn){mode, 1 + (bidirectional != 0), type, input, hidden, projected == hidden ? 0 : projected, layers};
    return 0;
}
int cudnnSetRNNDataDescriptor(struct data *of, int type, int layout, int steps, int batch, int size, const int *lengths,
                              void *fill) {
    *of = (struct data){steps, batch};
    return 0;
}

static size_t item_bytes(int type) {
    enum { DOUBLE = 1, HALF = 2, BFLOAT16 = 9 }; /* cudnnDataType_t */
    return type == DOUBLE ? 8 : type == HALF || type == BFLOAT16 ? 2 : 4;
}
static int gates(const struct rnn *of) {
    enum { LSTM = 2, GRU = 3 }; /* cudnnRNNMode_t */
    return of->mode == LSTM ? 4 : of->mode == GRU ? 3 : 1;
}
static int width(const struct rnn *of) { return of->projected ? of->projected : of->hidden; }
static int inputs(const struct rnn *of, int layer) {
    return layer < of->directions ? of->input : of->directions * width(of);
}
static size_t matrices(const struct rnn *of, int layer) {
    return (size_t)of->hidden * (gates(of) * (inputs(of, layer) + width(of)) + of->projected);
}

int cudnnGetRNNWeightSpaceSize(void *h, const struct rnn *of, size_t *bytes) {
    size_t count = 2 * gates(of) * (size_t)of->hidden * of->layers * of->directions;
    for (int layer = 0; layer < of->layers * of->directions; layer++) count += matrices(of, layer);
    *bytes = count * item_bytes(of->type);
    return 0;
}
int cudnnGetRNNWeightParams(void *h, const struct rnn *of, int layer, size_t bytes, char *weights, int gate,
                            struct tensor *matrix, char **matrix_at, struct tensor *bias, char **bias_at) {
    int all = gates(of), hidden = of->hidden, in = inputs(of, layer);
    if (matrix) {
        size_t at = 0;
        for (int before = 0; before < layer; before++) at += matrices(of, before);
        if (gate < all) at += (size_t)gate * hidden * in;
        else at += (size_t)all * hidden * in + (size_t)(gate - all) * hidden * width(of);
        *matrix = (struct tensor){{1, gate < 2 * all ? hidden : of->projected, gate < all ? in : gate < 2 * all ? width(of) : hidden}};
        *matrix_at = weights + at * item_bytes(of->type);
    }
    if (bias) {
        size_t at = (size_t)(2 * all * layer + gate) * hidden;
        for (int each = 0; each < of->layers * of->directions; each++) at += matrices(of, each);
        *bias = (struct tensor){{1, hidden, 1}};
        *bias_at = weights + at * item_bytes(of->type);
    }
    return 0;
}
int cudnnSetTensorNdDescriptor(struct tensor *of, int type, int count, const int *sizes, const int *strides) {
    return fakecuda_called("cudnnSetTensorNdDescriptor", type, sizes[0], sizes[1], strides[0], strides[1]);
}
int cudnnGetTensorNdDescriptor(const struct tensor *of, int wanted, int *type, int *count, int *sizes, int *strides) {
    *count = 3;
    memcpy(sizes, of->sizes, sizeof of->sizes);
    return 0;
}
int cudnnGetRNNTempSpaceSizes(void *h, const struct rnn *of, int training, const struct data *x, size_t *workspace,
                              size_t *reserve) {
    const char *given = getenv("FAKE_CUDNN_RESERVE"), *space = getenv("FAKE_CUDNN_WORKSPACE");
    size_t each = (size_t)x->steps * x->batch * of->layers * of->directions * (gates(of) + 2) * of->hidden;
    if (workspace) *workspace = space ? atoll(space) : 0;
    if (reserve) *reserve = given ? atoll(given) : each * item_bytes(of->type);
    return 0;
}

/* NCCL: every rank finds the others at once, and what collectives would send stays where it was. But what is small is
   gathered, as if all ranks had what this one has: DDP compares the shapes of parameters so. */
struct comm { int ranks, rank; };
typedef struct { char internal[128]; } ncclUniqueId;
int ncclGetVersion(int *version) { *version = 22907; return 0; }
int ncclGetUniqueId(ncclUniqueId *id) { memset(id, 0, sizeof *id); return 0; }
const char *ncclGetErrorString(int error) { return "fakecuda"; }
const char *ncclGetLastError(void *of) { return "fakecuda"; }
int ncclCommInitRank(struct comm **made, int ranks, ncclUniqueId id, int rank) {
    *made = malloc(sizeof **made);
    **made = (struct comm){ranks, rank};
    return 0;
}
int ncclCommInitRankConfig(struct comm **made, int ranks, ncclUniqueId id, int rank, void *config) {
    return ncclCommInitRank(made, ranks, id, rank);
}
int ncclCommInitRankScalable(struct comm **made, int ranks, int rank, int ids, ncclUniqueId *id, void *config) {
    return ncclCommInitRank(made, ranks, *id, rank);
}
/* Who else is of the new one is not known here: as many as of the old one. */
int ncclCommSplit(struct comm *of, int color, int key, struct comm **made, void *config) {
    return ncclCommInitRank(made, of->ranks, (ncclUniqueId){{0}}, of->rank);
}
int ncclCommCount(const struct comm *of, int *ranks) { *ranks = of->ranks; return 0; }
int ncclCommUserRank(const struct comm *of, int *rank) { *rank = of->rank; return 0; }
int ncclCommGetAsyncError(struct comm *of, int *error) { *error = 0; return 0; }

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream);
int ncclAllGather(const char *from, char *to, size_t count, int type, const struct comm *of, void *stream) {
    enum { SMALL = 1 << 16, DEVICE_TO_DEVICE = 3 };
    static const size_t ITEM[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    size_t bytes = count * ITEM[type];
    for (int rank = 0; bytes <= SMALL && rank < of->ranks; rank++)
        if (to + rank * bytes != from) cudaMemcpyAsync(to + rank * bytes, from, bytes, DEVICE_TO_DEVICE, stream);
    return 0;
}
