"""A Ray cluster on this machine alone: a head without CPUs and two nodes of two CPUs, each with a raylet of its own.

    python -m tests.support.two_nodes TEMP_DIR ADDRESS

prints its address as JSON, removes the last node at the line ``remove`` on standard input, adds another of an IP address at
``add ADDRESS``, and ends when the input does.
"""

from __future__ import annotations

import json
import sys

from ray.cluster_utils import Cluster

CPUS = 2


def main(temp_dir: str, elsewhere: str) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": temp_dir, "dashboard_agent_listen_port": 0},
    )
    try:
        # The second has another address, as on another machine: what meets over both goes through a gate.
        nodes = [cluster.add_node(num_cpus=CPUS), cluster.add_node(num_cpus=CPUS, node_ip_address=elsewhere)]
        print(json.dumps({"address": cluster.address, "nodes": [node.node_id for node in nodes]}), flush=True)  # noqa: T201
        for line in sys.stdin:
            match line.split():
                case ["remove"]:
                    cluster.remove_node(nodes.pop(), allow_graceful=False)
                case ["add", address]:
                    nodes.append(cluster.add_node(num_cpus=CPUS, node_ip_address=address))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
