/* cuBLAS and cuDNN without a GPU: what torch reads back from them. All else of them does nothing; the launcher adds that.

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
MAKES(cublasLtMatrixLayoutCreate)
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
MAKES(cudnnCreateRNNDataDescriptor)
MAKES(cudnnCreateRNNDescriptor)
MAKES(cudnnCreateSpatialTransformerDescriptor)
MAKES(cudnnCreateTensorDescriptor)
int cudnnBackendCreateDescriptor(int type, void **made) { *made = handle(); return 0; }
int cudnnBackendGetAttribute(void *descriptor, int attribute, int type, int64_t wanted, int64_t *found, void *values) {
    enum { INT64 = 3, NUMERICAL_NOTE = 11, BEHAVIOR_NOTE = 19, PLAN_WORKSPACE_SIZE = 402 }; /* of cudnn_graph.h */
    const char *workspace = getenv("FAKE_CUDNN_WORKSPACE");
    if (found) *found = type != NUMERICAL_NOTE && type != BEHAVIOR_NOTE;
    if (type == INT64 && values && wanted > 0)
        *(int64_t *)values = attribute == PLAN_WORKSPACE_SIZE && workspace ? atoll(workspace) : 0;
    return 0;
}
GIVES(cudnnDropoutGetStatesSize, size_t, 1 << 20)
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
