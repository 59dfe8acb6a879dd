"""How fast devices reach each other: within a node, and between nodes.

Rings as NCCL builds them: of a collective, each of n devices sends and receives (n - 1)/n of all bytes. Devices of one
node reach each other at the node's rate. Where a group spans nodes, each of its members in a node has a network card of
its own, and together they cross at most as fast as the node's own links.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cost_models.devices import DeviceSpec
from planner.common.units import Size, parse_size
from planner.errors import UsageError

_GB = 10**9

# Bytes a second of one device in one direction, and of its network card. NVLink: half of the total that the data sheet
# names. Networks: one card for each device as in the vendor's own machines (DGX A100 and H100, and their successors).
# fmt: off
_KNOWN = {
    "a100-40": (300, 25.0, "NVIDIA DGX A100: NVLink 3, a 200 Gb/s card for each GPU"),
    "a100-80": (300, 25.0, "NVIDIA DGX A100: NVLink 3, a 200 Gb/s card for each GPU"),
    "h100":    (450, 50.0, "NVIDIA DGX H100: NVLink 4, a 400 Gb/s card for each GPU"),
    "h200":    (450, 50.0, "NVIDIA DGX H200: NVLink 4, a 400 Gb/s card for each GPU"),
    "b200":    (900, 50.0, "NVIDIA DGX B200: NVLink 5, a 400 Gb/s card for each GPU"),
    "mi300x":  (448, 50.0, "AMD Instinct MI300X platform: 7 links of 64 GB/s; a 400 Gb/s card assumed for each"),
}
# fmt: on

EFFICIENCY = 0.8
"""What large collectives reach of a link's rate: NCCL's own tests show three quarters to nine tenths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a cluster whose nodes are alike; rates of one device, in one direction."""

    node_devices: int
    """Devices of one node."""
    node_bytes_per_second: float
    network_bytes_per_second: float
    node_hop_seconds: float = 2e-6
    """What each further device of a node adds to a collective."""
    network_hop_seconds: float = 8e-6
    """What each further node adds."""
    efficiency: float = EFFICIENCY
    source: str = ""

    def __post_init__(self) -> None:
        if self.node_devices < 1:
            raise UsageError(f"a node has at least 1 device, not {self.node_devices}")

    def pass_seconds(self, size_bytes: float, members: int, stride: int = 1) -> float:
        """Return the time in which a group gathers so many bytes, or sums and scatters them.

        Members are so many devices apart. A sum that all are to have takes twice that.

        >>> links = Links(node_devices=8, node_bytes_per_second=100.0, network_bytes_per_second=10.0, efficiency=1.0,
        ...               node_hop_seconds=0.0, network_hop_seconds=0.0)
        >>> links.pass_seconds(80, 8), links.pass_seconds(160, 16), links.pass_seconds(160, 2, stride=8)
        (0.7, 1.875, 8.0)
        """
        if members == 1:
            return 0.0
        local = max(1, min(members, self.node_devices // stride))
        nodes = -(-members // local)
        rate = self.node_bytes_per_second
        if nodes > 1:
            rate = min(rate, local * self.network_bytes_per_second)
        hops = (local - 1) * self.node_hop_seconds + (nodes - 1) * self.network_hop_seconds
        return size_bytes * (members - 1) / members / (rate * self.efficiency) + hops

    def exchange_seconds(self, size_bytes: float, members: int, stride: int = 1) -> float:
        """Return the time in which each member sends so many bytes of its own, in equal parts to all (all-to-all)."""
        if members == 1:
            return 0.0
        local = max(1, min(members, self.node_devices // stride))
        is_local = local >= members
        rate = self.node_bytes_per_second if is_local else self.network_bytes_per_second
        leaving = (members - 1) / members if is_local else (members - local) / members
        hop = self.node_hop_seconds if is_local else self.network_hop_seconds
        return size_bytes * leaving / (rate * self.efficiency) + hop

    def send_seconds(self, size_bytes: float, distance: int) -> float:
        """Return the time in which a device sends bytes to one that far away; a row of them crosses nodes somewhere."""
        is_local = distance < self.node_devices
        rate = self.node_bytes_per_second if is_local else self.network_bytes_per_second
        return size_bytes / (rate * self.efficiency) + (self.node_hop_seconds if is_local else self.network_hop_seconds)


def links_of(
    device: DeviceSpec, *, node_devices: int = 8, node_link: Size | None = None, network: Size | None = None
) -> Links:
    """Return the links between devices of one kind, a second's bytes of which may be given.

    Cards that no such machine is known for reach each other over the host, at the rate of the link to it, and other
    nodes through one card of 100 Gb/s for all.
    """
    known = _KNOWN.get(device.name)
    shared = 12.5 / node_devices
    node, net, source = known or (device.host_link_bytes_per_second / _GB, shared, "over the host; 100 Gb/s a node")
    links = Links(
        node_devices=node_devices,
        node_bytes_per_second=node * _GB,
        network_bytes_per_second=net * _GB,
        source=source,
    )
    if node_link is not None:
        links = replace(links, node_bytes_per_second=float(parse_size(node_link)), source="given")
    if network is not None:
        links = replace(links, network_bytes_per_second=float(parse_size(network)), source="given")
    if not links.node_bytes_per_second:
        raise UsageError(f"nothing is known of links between devices {device.name!r}: give --node-link and --network")
    return links
