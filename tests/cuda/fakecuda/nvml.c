/* The management library without a GPU: expandable segments ask it whether memory can be shared with other machines. */
#define NOTHING(name) int name(void) { return 0; }
NOTHING(nvmlInit_v2)
NOTHING(nvmlDeviceGetComputeRunningProcesses)
NOTHING(nvmlDeviceGetGpuFabricInfoV)
NOTHING(nvmlDeviceGetHandleByPciBusId_v2)
NOTHING(nvmlDeviceGetNvLinkRemoteDeviceType)
NOTHING(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOTHING(nvmlSystemGetCudaDriverVersion_v2)
