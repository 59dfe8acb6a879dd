"""Find the device that a model is on, and its figures."""

from __future__ import annotations

from dataclasses import replace

import torch

import cost_models
from cost_models.devices import DeviceSpec, library_bytes, unknown_gpu
from planner.capture.torch_internals import has_onednn
from planner.measure import cuda_settings
from planner.plans import device_file


def here(device: torch.device) -> DeviceSpec:
    """Describe a device of this machine: by the table, or as far as its driver does."""
    if device.type != "cuda":
        spec = cost_models.device("cpu")
        if has_onednn(torch.bfloat16):
            return spec
        # Neither type of 16 bits has a fast kernel then.
        rates = spec.flops_per_second
        return replace(spec, flops_per_second={**rates, "bfloat16": rates["float16"]})
    name = torch.cuda.get_device_name(device)
    try:
        spec = cost_models.device(name)
    except cost_models.UnknownNameError:
        facts = torch.cuda.get_device_properties(device)
        bus_bits, memory_kilohertz = getattr(facts, "memory_bus_width", 256), getattr(facts, "memory_clock_rate", 7e6)
        spec = unknown_gpu(
            name,
            architecture=facts.gcnArchName.split(":")[0] if torch.version.hip else f"sm{facts.major}{facts.minor}",
            memory_bytes=facts.total_memory,
            multiprocessors=facts.multi_processor_count,
            clock_hertz=1e3 * getattr(facts, "clock_rate", 1.5e6),
            memory_bits_per_second=2e3 * memory_kilohertz * bus_bits,
        )
    return _under_this_torch(spec)


def find(name: str) -> DeviceSpec:
    """Return the figures of a named device, or of a device file, under the torch of this machine."""
    return _under_this_torch(device_file.find(name))


def _under_this_torch(spec: DeviceSpec) -> DeviceSpec:
    """Let matrix libraries keep what they do in this version of torch; what a device file says of them stays."""
    if spec.library_bytes != library_bytes(spec.architecture):
        return spec
    return replace(spec, library_bytes=sum(cuda_settings.workspaces(spec.architecture)))


def _is_here(spec: DeviceSpec, device: torch.device) -> bool:
    return spec.kind == device.type and (spec.kind == "cpu" or spec.name == here(device).name)


def place(wanted: str | None) -> str:
    """Say where to build a model that is to be planned for a device: on the GPU of this machine if it is that one."""
    if not torch.cuda.is_available():
        return "cpu"
    return "cuda" if wanted is None or _is_here(device_file.find(wanted), torch.device("cuda")) else "cpu"


def device_here(device: torch.device, spec: DeviceSpec) -> torch.device | None:
    """Return the device that a model is on if it is the one that is planned for, so that it can be asked."""
    return device if _is_here(spec, device) else None


def device_spec(device: torch.device, name: str | None) -> DeviceSpec:
    """Return the figures of a named device, or of the one that a model is on."""
    return find(name) if name else here(device)
