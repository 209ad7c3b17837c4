"""Clusters: device types with their memory and precisions, the links between them, and data sheets of GPUs.

`load_cluster` reads a cluster file.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.cluster.cluster import Cluster, DeviceRole, DeviceType, Link, Network, load_cluster
    from qsync_opt.cluster.datasheets import DATA_SHEETS, DataSheet, data_sheet
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "DATA_SHEETS", "Cluster", "DataSheet", "DeviceRole", "DeviceType", "Link", "Network", "data_sheet",
    "load_cluster",
]  # fmt: skip
