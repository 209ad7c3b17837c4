"""The cluster that a plan is for: device types with their memory and precisions, and the links between them.

Read a cluster file with `load_cluster`; data sheets of common cards stand beside it.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.cluster.cluster import Cluster, DeviceRole, DeviceType, load_cluster
    from qsync_opt.cluster.datasheets import DATA_SHEETS, DataSheet, data_sheet
    from qsync_opt.cluster.network import Link, Network
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "DATA_SHEETS",
    "Cluster",
    "DataSheet",
    "DeviceRole",
    "DeviceType",
    "Link",
    "Network",
    "data_sheet",
    "load_cluster",
]
