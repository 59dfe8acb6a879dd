/* The GPUs that can be stood in for: FAKE_GPU names one. The figures are those of the vendor's data sheets. */
#include <stdlib.h>
#include <string.h>

struct gpu {
    const char *key, *name;
    int architecture, multiprocessors, l2_mib, shared_kib, bus_bits;
    double memory_gib;
};

static const struct gpu GPUS[] = {
    {"h100", "NVIDIA H100 80GB HBM3", 90, 132, 50, 227, 5120, 79.1},
    {"h200", "NVIDIA H200", 90, 132, 50, 227, 6144, 139.8},
    {"a100-80", "NVIDIA A100-SXM4-80GB", 80, 108, 40, 163, 5120, 79.2},
    {"a100-40", "NVIDIA A100-SXM4-40GB", 80, 108, 40, 163, 5120, 39.4},
    {"t4", "Tesla T4", 75, 40, 4, 64, 256, 14.6},
    {"rtx-3090", "NVIDIA GeForce RTX 3090", 86, 82, 6, 99, 384, 23.6},
    {"rtx-4090", "NVIDIA GeForce RTX 4090", 89, 128, 72, 99, 384, 23.5},
    {"l40s", "NVIDIA L40S", 89, 142, 96, 99, 384, 44.4},
    {"b200", "NVIDIA B200", 100, 148, 126, 227, 8192, 178.0},
    {"rtx-5090", "NVIDIA GeForce RTX 5090", 120, 170, 96, 99, 512, 31.3},
};

static const struct gpu *gpu(void) {
    static const struct gpu *chosen;
    if (!chosen) {
        const char *key = getenv("FAKE_GPU");
        chosen = &GPUS[0];
        for (size_t i = 0; key && i < sizeof GPUS / sizeof *GPUS; i++)
            if (!strcmp(GPUS[i].key, key)) chosen = &GPUS[i];
    }
    return chosen;
}

static int gpu_count(void) {
    const char *count = getenv("FAKE_GPU_COUNT");
    return count ? atoi(count) : 1;
}

static size_t gpu_bytes(void) {
    const char *gib = getenv("FAKE_GPU_GIB");
    return (size_t)((gib ? atof(gib) : gpu()->memory_gib) * (1ull << 30));
}
